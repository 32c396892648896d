"""Language and vision models as lists of independent layers.

Nothing here knows a stage, a rank or a schedule; `cut` only counts layers.
"""
