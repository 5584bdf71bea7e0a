"""The search for a table: proposals from dataflow, each verified."""
