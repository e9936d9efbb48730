"""Output for people: pictures, pages, tables, explanations, and exports to other tools."""
