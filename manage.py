#!/usr/bin/env python
"""Django's command line, with one clear line for settings that cannot work."""

import os
import sys

from gpuportal.errors import SetupError


def main() -> int:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "gpuportal.settings")
    try:
        from django.core.management import execute_from_command_line

        from gpuportal.embedded import ensure_services_for

        ensure_services_for(sys.argv)
        execute_from_command_line(sys.argv)
    except SetupError as error:
        print(f"gpuportal: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        line = SetupError.line_for(error)
        if line is None or os.environ.get("GPUPORTAL_TRACEBACK") == "1":
            raise
        print(f"gpuportal: {line}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
