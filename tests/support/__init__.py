"""Stand-ins and generators that tests of several folders use; no test is in here."""
