//! Packed matrices from integers and scales that were quantized elsewhere, such as in a checkpoint.

use super::packed::{GROUP, PackedMatrix, TILE_FEATURES, TileMut, WeightFormat};
use crate::{Error, Result, ensure};
use half::bf16;
use std::{panic::resume_unwind, thread};

const OPERATOR: &str = "gemm.from_groups";

impl PackedMatrix {
    /// A quantized matrix `[out_features, in_features]` whose scale and integers for output feature `f` and inputs
    /// `32 g .. 32 (g + 1)` are `group(f, g)`, which all cores call. No weight is rounded.
    ///
    /// # Errors
    /// When `format` is a float format, `in_features` is not a multiple of [`GROUP`], an integer is outside the range of `format`, or
    /// memory is exhausted.
    pub fn from_groups(
        format: WeightFormat,
        [features, inputs]: [usize; 2],
        group: impl Fn(usize, usize) -> (bf16, [i8; GROUP]) + Sync,
    ) -> Result<Self> {
        if let WeightFormat::Float(dtype) = format {
            return Err(Error::new(OPERATOR, format!("format = {dtype}, expected int8 or int4")));
        }
        let (low, high) = format.integer_range();
        ensure!(
            inputs.is_multiple_of(GROUP),
            OPERATOR,
            "in_features = {inputs} is not a multiple of {GROUP}, the inputs of a scale"
        );
        let mut packed = Self::zeroed(format, [features, inputs])?;
        let fill = |tile: &mut TileMut<'_>, feature: usize| {
            for index in 0..inputs / GROUP {
                let (scale, integers) = group(feature, index);
                if let Some(integer) = integers.iter().find(|integer| !(low..=high).contains(*integer)) {
                    let message = format!(
                        "feature {feature}, group {index}: integer = {integer}, expected {low} to {high}"
                    );
                    return Err(Error::new(OPERATOR, message));
                }
                tile.set_group(feature % TILE_FEATURES, index, scale, &integers);
            }
            Ok(())
        };
        let mut tiles = packed.tiles_mut();
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let chunk = tiles.len().div_ceil(cores).max(1);
        let fill = &fill;
        thread::scope(|scope| {
            let threads: Vec<_> = tiles
                .chunks_mut(chunk)
                .enumerate()
                .map(|(at, tiles)| {
                    let rows = at * chunk * TILE_FEATURES..features;
                    scope.spawn(move || {
                        let mut rows = rows.zip(0..tiles.len() * TILE_FEATURES);
                        rows.try_for_each(|(feature, at)| fill(&mut tiles[at / TILE_FEATURES], feature))
                    })
                })
                .collect();
            let results =
                threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
            results.collect::<Result<()>>()
        })?;
        Ok(packed)
    }
}
