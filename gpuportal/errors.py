"""Settings that cannot work: one clear line instead of a traceback."""

from __future__ import annotations


class SetupError(Exception):
    """A setting, a folder, a port or a service that cannot be used; the message names it and what to do."""

    @staticmethod
    def line_for(error: BaseException) -> str | None:
        """One line for errors that mean a wrong setting; ``None`` for everything else (a defect: traceback)."""
        from django.core.exceptions import ImproperlyConfigured
        from django.db.utils import OperationalError

        seen: BaseException | None = error
        while seen is not None:
            if isinstance(seen, SetupError | ImproperlyConfigured):
                return str(seen)
            if isinstance(seen, OperationalError) and "connect" in str(seen).lower():
                return f"the database cannot be reached (DATABASE_URL): {str(seen).strip().splitlines()[0]}"
            seen = seen.__cause__
        return None
