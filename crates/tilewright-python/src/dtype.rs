//! Element types of tensor arguments: those of the engine, and integers.

use crate::errors::invalid;
use pyo3::prelude::*;
use std::fmt;
use tilewright::Dtype;

/// The type of a tensor's elements, with NumPy's and torch's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TensorDtype {
    /// A type of the engine's tensors.
    Element(Dtype),
    F64,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Bool,
}

impl TensorDtype {
    /// Names, and codes of array interfaces.
    const NAMED: [(&'static str, &'static str, Self); 15] = [
        ("float32", "f4", Self::Element(Dtype::F32)),
        ("float16", "f2", Self::Element(Dtype::F16)),
        ("bfloat16", "-", Self::Element(Dtype::Bf16)),
        ("float8_e4m3fn", "-", Self::Element(Dtype::E4m3)),
        ("float8_e5m2", "-", Self::Element(Dtype::E5m2)),
        ("int8", "i1", Self::Element(Dtype::I8)),
        ("int32", "i4", Self::I32),
        ("int64", "i8", Self::I64),
        ("uint8", "u1", Self::U8),
        ("bool", "b1", Self::Bool),
        ("uint32", "u4", Self::U32),
        ("uint64", "u8", Self::U64),
        ("float64", "f8", Self::F64),
        ("int16", "i2", Self::I16),
        ("uint16", "u2", Self::U16),
    ];

    /// Whether torch tensors of this type can require a gradient.
    pub(crate) fn has_gradients(self) -> bool {
        matches!(self, Self::Element(_) | Self::F64)
    }

    /// The type with this name.
    pub(crate) fn named(name: &str) -> PyResult<Self> {
        let found = Self::NAMED.iter().find(|(known, ..)| *known == name);
        let unknown = || {
            let known: Vec<&str> = Self::NAMED.iter().map(|(known, ..)| *known).collect();
            invalid("tensor", format!("dtype = {name}, expected one of {}", known.join(", ")))
        };
        found.map(|(.., dtype)| *dtype).ok_or_else(unknown)
    }

    /// The type of an array interface, for example `<f4`.
    pub(crate) fn of_typestr(typestr: &str) -> PyResult<Self> {
        let code = typestr.trim_start_matches(['<', '|', '=']);
        let found = Self::NAMED.iter().find(|(_, known, _)| *known == code);
        found.map_or_else(|| Self::named(typestr), |(.., dtype)| Ok(*dtype))
    }

    /// The type of the engine's tensors, if it is one.
    pub(crate) fn float(self) -> Option<Dtype> {
        if let Self::Element(dtype) = self { Some(dtype) } else { None }
    }

    /// Bytes of one element.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::Element(dtype) => dtype.size(),
            Self::U8 | Self::Bool => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }
}

impl fmt::Display for TensorDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Self::NAMED.iter().find(|(.., dtype)| dtype == self);
        f.write_str(named.map_or("unknown", |(name, ..)| name))
    }
}

/// Rejects a big-endian type of an array interface.
pub(crate) fn check_byte_order(typestr: &str) -> PyResult<()> {
    if typestr.starts_with('>') {
        let text = format!("dtype = {typestr} is big-endian, expected little-endian elements");
        return Err(invalid("tensor", text));
    }
    Ok(())
}

/// A dtype of the engine by name.
pub(crate) fn element_type(operator: &'static str, name: &str) -> PyResult<Dtype> {
    TensorDtype::named(name)?
        .float()
        .ok_or_else(|| invalid(operator, format!("dtype = {name}, expected a float or int8")))
}
