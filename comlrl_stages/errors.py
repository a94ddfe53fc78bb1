"""The one exception that means: the user can mend this."""


class UserError(Exception):
    """A mistake in a config, a file or a user function.

    Its message says what was found, where (file, key, row), what was expected and what to do. The command line
    prints it without a traceback and exits with code 1.
    """
