//! The attention kernel of tensor cores in the simulator, against the definition in f64.

mod bytes;
mod case;
mod halves;
mod hooks;
mod judge;
mod latent;
mod numbers;
mod shapes;
mod world;
