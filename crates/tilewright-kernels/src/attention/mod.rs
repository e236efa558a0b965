//! Attention kernels.

pub mod body;
pub mod choose;
pub mod divisor;
pub mod items;
pub mod kernel;
pub mod operator;
pub mod params;
pub mod plan_device;
