from counterd.listing import Table

TABLES: tuple[Table, ...]
