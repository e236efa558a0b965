//! Tensor-core attention kernels in the simulator, against the f64 definition.

mod bytes;
mod case;
mod halves;
mod hooks;
mod judge;
mod latent;
mod numbers;
mod shapes;
mod wgmma;
mod world;
