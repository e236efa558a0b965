//! Matrix products.

pub mod sm90;
