"""What has no way through shared memory goes through gloo: sparse tensors, some reductions.

Ranks of one machine meet in shared memory first, in the order of all their collectives, and say in
words what they are about to do. So who calls something else is found out before gloo, which would
mix up messages or end the process, and who does not come is known by name.
"""

from gradsync.backend.engines import Engines
from gradsync.backend.flows import Clock, explained
from gradsync.backend.lane import Call, Lane, Task
from gradsync.backend.shared_memory import Started
from gradsync.errors import CollectiveMismatchError, FaultError


class Detour(Lane):
    """Collectives of gloo's between ranks that share memory."""

    def collective(
        self, name: str, call: Call, engines: Engines, kept: object, seconds: float, *, later: bool
    ) -> Started:
        """Run ``call`` with gloo, once all ranks have said that they will."""

        clock = Clock(seconds)

        def prepare() -> Task:
            meeting = self.memory.context.agree(f"{name} through gloo", seconds, True)

            def run() -> None:
                meeting.wait()
                self.through_gloo(call, engines, clock)

            return Task(meeting.number, name, run)

        return Started(self.start(prepare), kept, None, later)

    def explain(self, task: Task, error: Exception) -> Exception:
        """As it is if all ranks have it alike: then the group can be used on."""
        if isinstance(error, CollectiveMismatchError):
            return error
        if self.stop is not None:
            error = self.stop
        elif not isinstance(error, FaultError) or type(error) is FaultError:
            error = explained(task.name, error, self.neighbours)
            if type(error) is FaultError:
                error = self.gone() or error
        self.broken = error
        self.give_up(error)
        return error
