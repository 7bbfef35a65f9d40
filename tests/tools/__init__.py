"""Programs for developers: they measure, draw, stress or check, and no test is in here."""
