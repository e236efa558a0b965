//! Integer and parameter arrays on the host: tensors, or sequences of numbers.

use crate::{AnyBackend, TensorArg, TensorDtype, invalid, raised};
use pyo3::{
    Borrowed,
    prelude::*,
    types::{PyFloat, PyInt},
};
use std::sync::Arc;
use tilewright::{DeviceMemory, Dtype, Error, Indices, Result, attention::Index};

const OPERATOR: &str = "tensor.integers";

/// Integers of 32 or 64 bits, copied from a tensor on the host or from a sequence.
pub(crate) enum Integers {
    /// 32 bits; a plan shares the array.
    I32(Arc<Vec<i32>>),
    /// 64 bits.
    I64(Vec<i64>),
}

impl Integers {
    pub(crate) fn index(&self) -> Index<'_> {
        match self {
            Self::I32(values) => values.into(),
            Self::I64(values) => values.into(),
        }
    }

    /// The values in 32 bits.
    pub(crate) fn to_i32(&self, operator: &'static str, name: &str) -> Result<Vec<i32>> {
        match self {
            Self::I32(values) => Ok(values.to_vec()),
            Self::I64(values) => values.iter().map(|&value| narrow(operator, name, value)).collect(),
        }
    }

    /// The values as counts.
    pub(crate) fn to_usize(&self, operator: &'static str, name: &str) -> Result<Vec<usize>> {
        let count = |value: i64| {
            usize::try_from(value)
                .map_err(|_| Error::new(operator, format!("{name} = {value}, expected at least 0")))
        };
        match self {
            Self::I32(values) => values.iter().map(|&value| count(i64::from(value))).collect(),
            Self::I64(values) => values.iter().map(|&value| count(value)).collect(),
        }
    }
}

fn narrow(operator: &'static str, name: &str, value: i64) -> Result<i32> {
    i32::try_from(value)
        .map_err(|_| Error::new(operator, format!("{name} = {value} does not fit in 32 bits")))
}

impl<'py> FromPyObject<'_, 'py> for Integers {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Self::of(&object, host_tensor(&object)?)
    }
}

impl Integers {
    /// The numbers of a tensor on the host, or of a sequence.
    fn of(object: &Bound<'_, PyAny>, tensor: Option<TensorArg>) -> PyResult<Self> {
        match tensor {
            Some(tensor) => Self::copied(&tensor),
            None => object.extract().map(Self::I64).map_err(|_| not_numbers(object, "integers")),
        }
    }

    /// The numbers of a tensor on the host.
    fn copied(tensor: &TensorArg) -> PyResult<Self> {
        let bytes = tensor.compact();
        match tensor.dtype() {
            TensorDtype::I32 => Ok(Self::I32(Arc::new(values(&bytes)))),
            TensorDtype::I64 => Ok(Self::I64(values(&bytes))),
            other => Err(invalid(OPERATOR, format!("dtype = {other}, expected int32 or int64"))),
        }
    }

    /// The values in 64 bits.
    pub(crate) fn to_i64(&self) -> Vec<i64> {
        match self {
            Self::I32(values) => values.iter().map(|&value| i64::from(value)).collect(),
            Self::I64(values) => values.clone(),
        }
    }
}

/// Integers that are copied from the host, or stay on a device.
pub(crate) enum IndexArg {
    Host(Integers),
    Device(TensorArg),
}

impl<'py> FromPyObject<'_, 'py> for IndexArg {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match TensorArg::exported(&object)? {
            Some(tensor) if !tensor.on_host() => {
                Ok(Self::Device(tensor.owned_by(object.to_owned().unbind())))
            }
            tensor => Integers::of(&object, tensor).map(Self::Host),
        }
    }
}

impl IndexArg {
    /// The integers of a tensor, which has to live as long if it is on a device.
    pub(crate) fn of(tensor: TensorArg) -> PyResult<Self> {
        if tensor.on_host() { Integers::copied(&tensor).map(Self::Host) } else { Ok(Self::Device(tensor)) }
    }

    pub(crate) fn on_device(&self) -> bool {
        matches!(self, Self::Device(_))
    }

    /// The number of integers.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Host(integers) => integers.index().len(),
            Self::Device(tensor) => tensor.len(),
        }
    }

    /// The memory of integers on a device, which stays alive with them; those on the host are copied to the device of `backend`.
    pub(crate) fn into_memory(
        self,
        backend: &AnyBackend,
        operator: &'static str,
        name: &str,
    ) -> Result<DeviceMemory> {
        match self {
            Self::Host(integers) => backend.upload(&integers.to_i32(operator, name)?),
            Self::Device(tensor) => {
                tensor.integers::<i32>(operator, name)?;
                let on_host = || Error::new(operator, format!("{name} is in host memory, expected a GPU"));
                tensor.into_device_memory().ok_or_else(on_host)
            }
        }
    }

    /// The integers on the host.
    pub(crate) fn host(&self, operator: &'static str, name: &str) -> Result<&Integers> {
        match self {
            Self::Host(integers) => Ok(integers),
            Self::Device(_) => {
                Err(Error::new(operator, format!("{name} is on a device, expected host memory")))
            }
        }
    }

    /// Copies those on the host to `to`, then borrows either.
    pub(crate) fn indices<'a>(
        &'a self,
        operator: &'static str,
        name: &str,
        to: &'a mut Vec<i32>,
    ) -> Result<Indices<'a>> {
        match self {
            Self::Host(integers) => {
                *to = integers.to_i32(operator, name)?;
                Ok((&*to).into())
            }
            Self::Device(tensor) => tensor.integers(operator, name),
        }
    }
}

/// Words of 32 bits on the host or on a device.
pub(crate) struct WordArg(pub(crate) IndexArg);

impl<'py> FromPyObject<'_, 'py> for WordArg {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match TensorArg::exported(&object)? {
            Some(tensor) => IndexArg::of(tensor.words()).map(Self),
            None => object.extract().map(Self),
        }
    }
}

/// Booleans of a tensor on the host.
pub(crate) struct Flags(pub(crate) Vec<bool>);

impl<'py> FromPyObject<'_, 'py> for Flags {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match host_tensor(&object)? {
            None => object.extract().map(Self).map_err(|_| not_numbers(&object, "booleans")),
            Some(tensor) => Self::of(&tensor),
        }
    }
}

impl Flags {
    /// The booleans of a tensor on the host.
    pub(crate) fn of(tensor: &TensorArg) -> PyResult<Self> {
        check_on_host(tensor)?;
        match tensor.dtype() {
            TensorDtype::Bool | TensorDtype::U8 => {
                Ok(Self(tensor.compact().iter().map(|&byte| byte != 0).collect()))
            }
            other => Err(invalid("tensor.flags", format!("dtype = {other}, expected bool or uint8"))),
        }
    }
}

/// Bytes of a tensor on the host: packed masks, or masks of tokens.
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl<'py> FromPyObject<'_, 'py> for Bytes {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match host_tensor(&object)? {
            None => object.extract().map(Self).map_err(|_| not_numbers(&object, "bytes")),
            Some(tensor) if tensor.dtype() == TensorDtype::U8 => Ok(Self(tensor.compact().into_owned())),
            Some(tensor) => {
                Err(invalid("tensor.bytes", format!("dtype = {}, expected uint8", tensor.dtype())))
            }
        }
    }
}

/// One value for all rows, or one per row.
pub(crate) enum PerRow<T> {
    One(T),
    Each(Vec<T>),
}

impl<T: Copy> PerRow<T> {
    /// One value per row.
    pub(crate) fn expand(&self, operator: &'static str, name: &str, rows: usize) -> Result<Vec<T>> {
        match self {
            Self::One(value) => Ok(vec![*value; rows]),
            Self::Each(values) if values.len() == rows => Ok(values.clone()),
            Self::Each(values) => {
                let text = format!("{name} has {} elements, expected rows = {rows}", values.len());
                Err(Error::new(operator, text))
            }
        }
    }

    /// A number, a sequence, or a tensor on the host, whose elements `read` converts.
    fn extracted<'py>(
        object: &Bound<'py, PyAny>,
        expected: &str,
        read: impl FnOnce(TensorDtype, &[u8]) -> PyResult<Vec<T>>,
    ) -> PyResult<Self>
    where
        T: for<'a> FromPyObject<'a, 'py>,
    {
        let Some(tensor) = parameter_tensor(object)? else {
            let one = object.extract().map(Self::One);
            let each = || object.extract().map(Self::Each).map_err(|_| not_numbers(object, expected));
            return one.or_else(|_| each());
        };
        read(tensor.dtype(), &tensor.compact()).map(Self::Each)
    }
}

impl PerRow<f64> {
    /// One count per row; counts above `u32::MAX` select as much as that.
    pub(crate) fn counts(&self, operator: &'static str, name: &str, rows: usize) -> Result<Vec<u32>> {
        let values = self.expand(operator, name, rows)?;
        let count = |(row, value): (usize, f64)| {
            tilewright::ensure!(
                value >= 0.0 && value.fract() == 0.0,
                operator,
                "request {row}: {name} = {value}, expected an integer of at least 1"
            );
            Ok(value as u32)
        };
        values.into_iter().enumerate().map(count).collect()
    }

    /// One f32 per row.
    pub(crate) fn floats(&self, operator: &'static str, name: &str, rows: usize) -> Result<Vec<f32>> {
        Ok(self.expand(operator, name, rows)?.into_iter().map(|value| value as f32).collect())
    }
}

impl<'py> FromPyObject<'_, 'py> for PerRow<f64> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Self::extracted(&object, "numbers", |dtype, bytes| match dtype {
            TensorDtype::Element(Dtype::F32) => Ok(each::<f32>(bytes, f64::from)),
            TensorDtype::F64 => Ok(each::<f64>(bytes, |value| value)),
            TensorDtype::I32 => Ok(each::<i32>(bytes, f64::from)),
            TensorDtype::I64 => Ok(each::<i64>(bytes, |value| value as f64)),
            other => {
                let text = format!("dtype = {other}, expected float32, float64, int32 or int64");
                Err(invalid("tensor.parameters", text))
            }
        })
    }
}

/// Seeds or offsets.
impl<'py> FromPyObject<'_, 'py> for PerRow<u64> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Self::extracted(&object, "seeds of 64 bits", |dtype, bytes| match dtype {
            TensorDtype::U64 | TensorDtype::I64 => Ok(bytemuck::pod_collect_to_vec(bytes)),
            TensorDtype::I32 | TensorDtype::U32 => {
                Ok(bytemuck::pod_collect_to_vec::<u8, u32>(bytes).into_iter().map(u64::from).collect())
            }
            other => {
                let text = format!("dtype = {other}, expected an integer of 32 or 64 bits");
                Err(invalid("tensor.seeds", text))
            }
        })
    }
}

/// The elements in bytes, which are aligned unless they were copied.
fn values<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    bytemuck::try_cast_slice(bytes).map_or_else(|_| bytemuck::pod_collect_to_vec(bytes), <[T]>::to_vec)
}

fn each<T: bytemuck::Pod>(bytes: &[u8], number: impl Fn(T) -> f64) -> Vec<f64> {
    bytemuck::pod_collect_to_vec::<u8, T>(bytes).into_iter().map(number).collect()
}

/// The tensor, if the object is one; an error if it is on a device.
fn host_tensor(object: &Bound<'_, PyAny>) -> PyResult<Option<TensorArg>> {
    let Some(tensor) = TensorArg::exported(object)? else { return Ok(None) };
    check_on_host(&tensor)?;
    Ok(Some(tensor))
}

fn check_on_host(tensor: &TensorArg) -> PyResult<()> {
    tensor.device_memory().map_or(Ok(()), |memory| {
        let text = format!("the array is in the memory of device {}, expected host memory", memory.device());
        Err(raised(Error::new(OPERATOR, text)))
    })
}

/// The tensor, if the object is one with axes; others are numbers or sequences.
fn parameter_tensor(object: &Bound<'_, PyAny>) -> PyResult<Option<TensorArg>> {
    if object.is_instance_of::<PyFloat>() || object.is_instance_of::<PyInt>() {
        return Ok(None);
    }
    Ok(host_tensor(object)?.filter(|tensor| !tensor.shape().is_empty()))
}

fn not_numbers(object: &Bound<'_, PyAny>, expected: &str) -> PyErr {
    let kind = object.get_type().to_string();
    invalid(OPERATOR, format!("{kind} is not an array, expected {expected} in a tensor or a sequence"))
}
