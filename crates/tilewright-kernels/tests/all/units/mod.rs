//! Tests of single modules of the library. A second compilation of the library for unit tests would take as long as the first.

pub(crate) mod body_configs;
mod choose;
mod divisor;
mod entries;
mod items;
mod params;
mod row_partition;
