"""The tensor-parallel table as data: styles, layouts, the layers they are for."""
