//! Who owns which page and who runs next.

pub mod pages;
pub mod radix;
