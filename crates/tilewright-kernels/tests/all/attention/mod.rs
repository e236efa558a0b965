//! Tensor-core attention kernels in the simulator, against the f64 definition.

mod bytes;
mod case;
mod fp8;
mod halves;
mod hooks;
mod judge;
mod latent;
mod merges;
mod schedule;
mod shapes;
mod wgmma;
mod world;

use case::{CAUSAL, Case, FULL, SPOILED, Scales};
use judge::check;
use schedule::Segment;
use world::World;
