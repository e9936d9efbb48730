"""Reports on plans: pictures, HTML pages, tables, explanations, and exports to other tools."""
