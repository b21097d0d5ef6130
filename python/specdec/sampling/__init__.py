"""What callers say of sampling, and what a batch makes of it: parameters, processors, the token table."""
