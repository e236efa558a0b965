//! The oracle: every operator in f64, dense, from its definition. Slow on purpose, and knows neither plans nor
//! pages; tests and `bench` compare every backend with it.

pub mod activation;
pub mod attention;
pub mod norm;
pub mod quant;
pub mod rope;
pub mod sampling;
pub mod variant;
