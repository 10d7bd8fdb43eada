"""Exclusion constraints over a key and a stretch of time, without any extension.

PostgreSQL's GiST has no operator class for plain numbers unless ``btree_gist`` is installed, which neither the
embedded server ships nor every managed one allows. A number as a range of one element has one built in.
"""

from __future__ import annotations

from django.contrib.postgres.fields import RangeOperators
from django.db.models import BigIntegerField, F, Func, Value
from django.db.models.functions import Cast


def same(field: str) -> tuple[Func, str]:
    """An exclusion expression that is true for rows with the same value of an integer or foreign-key ``field``."""
    key = Cast(F(field), BigIntegerField())
    return Func(key, key, Value("[]"), function="int8range"), RangeOperators.OVERLAPS
