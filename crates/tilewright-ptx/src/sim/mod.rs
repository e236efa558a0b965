//! The simulator's arithmetic of matrices and its boxes of tensors.

pub mod matrix;
pub mod tensor;
