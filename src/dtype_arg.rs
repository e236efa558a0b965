//! Dtype arguments of the command line and JSON.

use clap::ValueEnum;
use serde::Deserialize;
use tilewright::Dtype;

/// A [`Dtype`] by name.
#[derive(Debug, Clone, Copy, Default, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DtypeArg {
    F32,
    F16,
    #[default]
    Bf16,
}

impl From<DtypeArg> for Dtype {
    fn from(name: DtypeArg) -> Self {
        match name {
            DtypeArg::F32 => Self::F32,
            DtypeArg::F16 => Self::F16,
            DtypeArg::Bf16 => Self::Bf16,
        }
    }
}
