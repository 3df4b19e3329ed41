"""The ``gradsync`` backend of ``torch.distributed``: collectives through shared memory."""
