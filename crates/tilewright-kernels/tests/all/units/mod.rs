//! Tests of single modules of the library. A second compilation of the library for unit tests would take as long as the first.

pub(crate) mod aligned_params;
mod choose;
mod divisor;
mod entries;
mod items;
mod mla_config;
mod mma_config;
mod norm_config;
mod params;
mod row_partition;
mod simt_config;
