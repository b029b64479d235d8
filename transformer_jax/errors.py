"""The one exception for mistakes that the user can mend.

`UserError` is raised at the edge - configuration, files, command line - with a sentence that says what is wrong and
what to do about it. The commands print that sentence and exit with code 2; any other exception is a bug and keeps its
traceback.
"""


class UserError(ValueError):
    """Something that the user gave is wrong. The message is one sentence that says what, and what to do."""


class AbsentError(UserError):
    """A text that is named is not there, or what would read it is not; or none is named."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or a device found no memory for what was asked."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error))
