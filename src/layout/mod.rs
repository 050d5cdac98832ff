//! Pure sizes:strides algebra over `0..n`: no I/O, no names.
