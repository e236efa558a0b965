//! The `--weights` argument: integer formats of weight matrices.

use clap::ValueEnum;
use tilewright::gemm::WeightFormat;

/// A quantized [`WeightFormat`] by name.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum WeightsArg {
    /// 8.5 bits per weight
    Int8,
    /// 4.5 bits per weight
    Int4,
}

impl From<WeightsArg> for WeightFormat {
    fn from(name: WeightsArg) -> Self {
        match name {
            WeightsArg::Int8 => Self::Int8,
            WeightsArg::Int4 => Self::Int4,
        }
    }
}
