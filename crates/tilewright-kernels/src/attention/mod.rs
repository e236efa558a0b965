//! Attention kernels.

pub mod divisor;
pub mod items;
pub mod merge;
pub mod params;
pub mod plan_device;
pub mod prefill_sm90;
mod query_row;
pub mod scalar;
pub mod tensor_core;
