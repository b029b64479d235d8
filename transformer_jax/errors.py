"""The one exception for mistakes that the user can mend.

It is raised at the edge - configuration, files, command line - with a sentence that says what is wrong and what
to do about it. The commands print that sentence and exit with code 2; any other exception is a bug and keeps its
traceback.
"""


class UserError(ValueError):
    """Something that the user gave is wrong. The message is one sentence that says what, and what to do."""
