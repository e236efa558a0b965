//! Random weights of a configuration, in anonymous memory: the shapes of a model without its files, for benchmarks.

use super::{Encoding, OPERATOR, TensorEntry, Weights};
use crate::model::ModelConfig;
use half::{bf16, f16};
use memmap2::MmapMut;
use std::{path::PathBuf, sync::Arc};
use tilewright::{Dtype, Element, Error, Result};

impl Weights {
    /// Weights of `config` in `dtype`: norms of 1, matrices uniform with variance `1 / in_features`, so that activations neither
    /// grow nor vanish. Equal seeds give equal weights.
    ///
    /// # Errors
    /// When `dtype` is none of f32, f16 and bf16, or memory is exhausted.
    pub fn random(config: &ModelConfig, dtype: Dtype, seed: u64) -> Result<Self> {
        let stored = match dtype {
            Dtype::F32 => safetensors::Dtype::F32,
            Dtype::F16 => safetensors::Dtype::F16,
            Dtype::Bf16 => safetensors::Dtype::BF16,
            other => {
                return Err(Error::new(OPERATOR, format!("dtype = {other}, expected f32, f16 or bf16")));
            }
        };
        let mut state = seed;
        let mut entry = |name: &str, shape: &[usize]| {
            let len = shape.iter().product::<usize>() * dtype.size();
            let mut memory = MmapMut::map_anon(len.max(1)).map_err(|error| {
                Error::new(OPERATOR, format!("{name}: {len} bytes cannot be allocated: {error}"))
            })?;
            let limit = match shape {
                [_, inputs] => Some((3.0 / *inputs as f32).sqrt()),
                _ => None,
            };
            let mut next = || match limit {
                Some(limit) => limit * uniform(&mut state),
                None => 1.0,
            };
            match dtype {
                Dtype::F32 => fill::<f32>(&mut memory[..len], &mut next),
                Dtype::F16 => fill::<f16>(&mut memory[..len], &mut next),
                _ => fill::<bf16>(&mut memory[..len], &mut next),
            }
            let map = memory.make_read_only().map_err(|error| {
                Error::new(OPERATOR, format!("{name}: memory cannot be made read-only: {error}"))
            })?;
            let (encoding, shape) = (Encoding::Elements(stored), shape.to_vec());
            Ok(TensorEntry { map: Arc::new(map), bytes: 0..len, encoding, shape, interleaved_heads: None })
        };
        let entries = config
            .parameters()
            .map(|parameter| Ok((parameter.name.clone(), entry(&parameter.name, &parameter.shape)?)))
            .collect::<Result<_>>()?;
        Ok(Self { entries, origin: PathBuf::from("random weights") })
    }
}

fn fill<T: Element + bytemuck::Pod>(memory: &mut [u8], next: &mut impl FnMut() -> f32) {
    bytemuck::cast_slice_mut::<u8, T>(memory).fill_with(|| T::from_f32(next()));
}

/// A number in -1..1 of SplitMix64.
fn uniform(state: &mut u64) -> f32 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 40) as f32 / (1u32 << 23) as f32 - 1.0
}
