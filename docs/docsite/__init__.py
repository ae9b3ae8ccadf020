"""What the documentation's site makes from the code while it is built: options, errors, the reference's sections."""
