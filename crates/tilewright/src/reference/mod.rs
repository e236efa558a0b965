//! The oracle: every operator in f64, dense, from its definition. It is slow on purpose and has neither plans nor
//! pages; tests and benchmarks compare every backend with it.

pub mod activation;
pub mod attention;
pub mod elementwise;
pub mod naive;
pub mod norm;
pub mod quantization;
pub mod rope;
pub mod sampling;
pub mod variant;
