//! The attention kernel of tensor cores in the simulator, against the definition in f64.

mod case;
mod hooks;
mod judge;
mod numbers;
mod shapes;
mod world;
