//! The tilewright command line.
fn main() {}
