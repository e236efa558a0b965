//! Matrix products.

pub mod sm80;
pub mod sm90;
