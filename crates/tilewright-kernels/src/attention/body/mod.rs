//! Bodies of the attention kernels.

pub mod mla;
pub mod mma;
mod mma_split_kv;
mod mma_split_q;
pub mod simt;
pub mod wgmma;
