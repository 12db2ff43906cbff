"""Definitions in numpy: obviously right, any float dtype; what the fast kernels are tested against."""
