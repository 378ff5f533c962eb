"""The exceptions of agentcomm.

Those about a value are ``ValueError`` too, so that code which knows nothing of agentcomm handles
them as it would handle torch's.
"""


class AgentCommError(Exception):
    """Base of all exceptions that agentcomm raises on purpose.

    Attributes:
        status: name of the core's status code (``"AGC_ERR_TIMEOUT"``), "" where Python found the
            fault.
        rank: the global rank that it is about, None if that is nobody or not known.
    """

    status: str = ""
    rank: int | None = None


class SpecError(AgentCommError, ValueError):
    """A codec spec, an option or a tensor that agentcomm cannot work with."""


class FrameError(AgentCommError, ValueError):
    """Bytes that are no frame: cut short, damaged, or of another version of the wire format."""


class MismatchError(AgentCommError):
    """Ranks that do not do the same: other settings, another model, other numbers of rounds."""


class PeerError(AgentCommError, RuntimeError):
    """A rank that is gone, or that did not answer within the timeout."""


class StateError(AgentCommError, RuntimeError):
    """A call at the wrong time: before ``init_process_group``, after ``close()``, beside a hook."""
