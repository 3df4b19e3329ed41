"""What has no way through shared memory goes through gloo: sparse tensors, some reductions.

Ranks of one machine meet in shared memory first, in the order of all their collectives, and say in
words what they are about to do. So who calls something else is found out before gloo, which would
mix up messages or end the process, and who does not come is known by name.
"""

from collections.abc import Callable

from gradsync.backend.engines import Engines
from gradsync.backend.flows import explained
from gradsync.backend.lane import Call, Lane, Task
from gradsync.backend.shared_memory import Started
from gradsync.errors import CollectiveMismatchError, FaultError


class Detour(Lane):
    """Collectives of gloo's between ranks that share memory."""

    def collective(
        self, name: str, call: Call, engines: Engines, kept: object, seconds: float, *, later: bool
    ) -> Started:
        """Run ``call`` with gloo, once all ranks have said that they will."""

        def prepare() -> Callable[[], None]:
            meeting = self.memory.agree(f"{name} through gloo", seconds, later=True).handle

            def run() -> None:
                meeting.wait()
                self.through_gloo(call, engines)

            return run

        return Started(self.start(name, prepare), kept, None, later)

    def number(self) -> int:
        """As those are counted that do not go through here."""
        return self.memory.context.issued

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
        self.memory.context.fail(str(error))  # so that nobody waits for us
        return error
