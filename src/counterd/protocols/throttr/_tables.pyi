from counterd.tables import Table

TABLES: tuple[Table, ...]
