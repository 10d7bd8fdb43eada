"""Compiles every template, so that a typo fails before a page does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "gpuportal.settings")


def main() -> int:
    import django
    from django.conf import settings
    from django.template import TemplateSyntaxError
    from django.template.loader import get_template

    django.setup()
    root = Path(settings.BASE_DIR) / "templates"
    failed = 0
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.suffix in (".html", ".txt"))
    for name in names:
        try:
            get_template(name)
        except TemplateSyntaxError as error:
            failed += 1
            print(f"templates/{name}: {error}", file=sys.stderr)
    print(f"{len(names)} templates compile." if not failed else f"{failed} of {len(names)} templates do not compile.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
