"""torch's DistributedTest suite, for the gloo backend.

The environment has to hold BACKEND=gloo and WORLD_SIZE before the import.
"""

from torch.testing._internal.distributed import distributed_test


class DistGloo(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
