//! Tensor arguments: address, dtype, shape and strides of memory that a Python object owns.
//!
//! | object | read from |
//! |---|---|
//! | torch tensor | `__dlpack_c_exchange_api__`; before torch 2.10 its attributes |
//! | NumPy array | `__array_interface__` |
//! | CUDA array of CuPy, Numba | `__cuda_array_interface__` |
//! | array of JAX and others | `__dlpack__` |

use crate::{
    TensorDtype,
    axes::{Axes, MAX_AXES, span},
    dlpack,
    dtype::check_byte_order,
    invalid, torch,
};
use pyo3::{Borrowed, prelude::*, types::PyDict};
use std::{borrow::Cow, ops::Range, sync::Arc};
use tilewright::{
    Dtype, Error, Result, View, ViewMut,
    tensor::{Data, DataMut, DeviceMemory},
};

const OPERATOR: &str = "tensor";
/// The device number of host memory.
const HOST: i64 = -1;

/// A tensor argument. It is valid during the call that received it.
pub(crate) struct TensorArg {
    memory: DeviceMemory,
    dtype: TensorDtype,
    shape: Axes,
    strides: Axes,
    on_host: bool,
    readonly: bool,
}

/// The fields that every exchange protocol describes; strides in elements.
pub(crate) struct TensorFields<'a> {
    pub(crate) address: u64,
    pub(crate) dtype: TensorDtype,
    pub(crate) shape: &'a [i64],
    /// `None` for a row-major tensor.
    pub(crate) strides: Option<&'a [i64]>,
    /// -1 is the host.
    pub(crate) device: i64,
    pub(crate) readonly: bool,
}

impl TensorArg {
    /// Checks the fields: no negative extent or stride, an aligned address, and a span within the address space.
    pub(crate) fn new(fields: TensorFields<'_>) -> PyResult<Self> {
        let TensorFields { address, dtype, shape, strides, device, readonly } = fields;
        let zeros = Axes::zeros(shape.len());
        let too_many = || invalid(OPERATOR, format!("{} axes, expected at most {MAX_AXES}", shape.len()));
        let mut extents = zeros.ok_or_else(too_many)?;
        for (extent, &given) in extents.iter_mut().zip(shape) {
            *extent = usize::try_from(given)
                .map_err(|_| invalid(OPERATOR, format!("shape {shape:?} has a negative extent")))?;
        }
        let (mut dense, mut steps) = (1_usize, extents);
        for (step, extent) in steps.iter_mut().zip(&*extents).rev() {
            *step = dense;
            dense = dense.saturating_mul(*extent);
        }
        if let Some(given) = strides {
            let wrong = || invalid(OPERATOR, format!("shape {shape:?} has strides {given:?}"));
            if given.len() != extents.len() {
                return Err(wrong());
            }
            for ((step, extent), given) in steps.iter_mut().zip(&*extents).zip(given) {
                if *extent > 1 {
                    *step = usize::try_from(*given)
                        .map_err(|_| invalid(OPERATOR, format!("stride = {given}, expected at least 0")))?;
                }
            }
        }
        let span = span(&extents, &steps, dtype.size());
        let end = span.and_then(|bytes| address.checked_add(bytes as u64).map(|_| bytes));
        let bytes = end.filter(|&bytes| isize::try_from(bytes).is_ok()).ok_or_else(|| {
            invalid(OPERATOR, format!("shape {shape:?} with these strides exceeds the address space"))
        })?;
        if bytes > 0 && (address == 0 || !address.is_multiple_of(dtype.size() as u64)) {
            let text =
                format!("address {address:#x} is not a multiple of {}, the size of {dtype}", dtype.size());
            return Err(invalid(OPERATOR, text));
        }
        let wrong = |_| invalid(OPERATOR, format!("device = {device}, expected -1 or a GPU"));
        let ordinal = if device == HOST { 0 } else { u32::try_from(device).map_err(wrong)? };
        // SAFETY: the exporter guarantees that the object describes its memory, and the caller of this module keeps the object
        // alive during the call; a `TensorArg` does not outlive it. Work on a device outlives the call: as for every CUDA
        // library, the caller frees tensors in stream order.
        #[allow(unsafe_code, reason = "the address comes from the exporter of a tensor")]
        let memory = unsafe { DeviceMemory::from_raw(address, bytes, ordinal, None) };
        Ok(Self { memory, dtype, shape: extents, strides: steps, on_host: device == HOST, readonly })
    }

    /// The tensor with an object that keeps its memory alive.
    pub(crate) fn owned_by(self, owner: Py<PyAny>) -> Self {
        Self { memory: self.memory.owned_by(Arc::new(owner)), ..self }
    }

    /// The memory, for work that outlives the call; `None` if it is on the host.
    pub(crate) fn into_device_memory(self) -> Option<DeviceMemory> {
        (!self.on_host).then_some(self.memory)
    }

    /// Flags as int8, which has the same bytes.
    pub(crate) fn flags(self) -> Self {
        let dtype = TensorDtype::Element(Dtype::I8);
        if matches!(self.dtype, TensorDtype::Bool | TensorDtype::U8) { Self { dtype, ..self } } else { self }
    }

    /// Words of 32 bits as int32, which has the same bytes.
    pub(crate) fn words(self) -> Self {
        if self.dtype == TensorDtype::U32 { Self { dtype: TensorDtype::I32, ..self } } else { self }
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(crate) fn dtype(&self) -> TensorDtype {
        self.dtype
    }

    pub(crate) fn on_host(&self) -> bool {
        self.on_host
    }

    /// The number of elements.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether both are views of the same elements.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let place = |of: &Self| (of.memory.address(), of.memory.device(), of.on_host, of.dtype);
        place(self) == place(other) && (&self.shape, &self.strides) == (&other.shape, &other.strides)
    }

    /// The addresses from the first to the last element.
    pub(crate) fn span(&self) -> Range<u64> {
        self.memory.address()..self.memory.address() + self.memory.bytes() as u64
    }

    /// The device memory; `None` for a tensor on the host.
    pub(crate) fn device_memory(&self) -> Option<&DeviceMemory> {
        (!self.on_host).then_some(&self.memory)
    }

    /// A view of a tensor of floats or int8.
    pub(crate) fn view(&self, operator: &'static str, name: &str) -> Result<View<'_>> {
        let dtype = self.element_type(operator, name)?;
        if !self.on_host {
            return self
                .memory
                .strided(dtype, 0, &self.shape, &self.strides)
                .map_err(|e| named(operator, name, e));
        }
        let bytes = self.bytes();
        let data = tilewright::with_dtype!(dtype, T => match bytes.is_empty() {
            true => Data::from(&[] as &[T]), // an empty slice of bytes is not aligned
            false => Data::from(bytemuck::try_cast_slice::<u8, T>(bytes)
                .map_err(|why| Error::new(operator, format!("{name}: {why}")))?),
        });
        View::strided(data, &self.shape, &self.strides).map_err(|error| named(operator, name, error))
    }

    /// A writable view of a tensor of floats or int8.
    pub(crate) fn view_mut(&mut self, operator: &'static str, name: &str) -> Result<ViewMut<'_>> {
        let dtype = self.element_type(operator, name)?;
        self.check_writable(operator, name)?;
        if !self.on_host {
            let view = self.memory.strided_mut(dtype, 0, &self.shape, &self.strides);
            return view.map_err(|error| named(operator, name, error));
        }
        let (shape, strides) = (self.shape, self.strides);
        let bytes = self.bytes_mut();
        let data = tilewright::with_dtype!(dtype, T => match bytes.is_empty() {
            true => DataMut::from(&mut [] as &mut [T]),
            false => DataMut::from(bytemuck::try_cast_slice_mut::<u8, T>(bytes)
                .map_err(|why| Error::new(operator, format!("{name}: {why}")))?),
        });
        ViewMut::strided(data, &shape, &strides).map_err(|error| named(operator, name, error))
    }

    pub(crate) fn check_writable(&self, operator: &'static str, name: &str) -> Result<()> {
        tilewright::ensure!(!self.readonly, operator, "{name} is read-only, expected a writable tensor");
        Ok(())
    }

    /// The memory of the tensor, whose addresses are the host's if it is on the host.
    pub(crate) fn memory_mut(&mut self) -> &mut DeviceMemory {
        &mut self.memory
    }

    fn element_type(&self, operator: &'static str, name: &str) -> Result<Dtype> {
        self.dtype.float().ok_or_else(|| {
            let text = format!(
                "{name} is {}, expected float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8",
                self.dtype
            );
            Error::new(operator, text)
        })
    }

    /// The bytes of a tensor on the host, gaps included.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.memory.bytes() == 0 {
            return &[];
        }
        // SAFETY: as in `new`, and the address is not 0. Bytes have no invalid values and no alignment.
        #[allow(unsafe_code, reason = "the memory belongs to a Python object that outlives the call")]
        unsafe {
            std::slice::from_raw_parts(self.memory.address() as *const u8, self.memory.bytes())
        }
    }

    /// The bytes of a writable tensor on the host, gaps included.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.memory.bytes() == 0 {
            return &mut [];
        }
        // SAFETY: as in `bytes`. Operators reject an output whose span overlaps another argument's (`overlap.rs`).
        #[allow(unsafe_code, reason = "the memory belongs to a Python object that outlives the call")]
        unsafe {
            std::slice::from_raw_parts_mut(self.memory.address() as *mut u8, self.memory.bytes())
        }
    }

    /// Whether the elements are in row-major order without gaps.
    fn is_dense(&self) -> bool {
        let mut dense = 1_usize;
        let is_dense = self.shape.iter().zip(&*self.strides).rev().all(|(&extent, &stride)| {
            let is_dense = extent == 1 || stride == dense;
            dense = dense.saturating_mul(extent);
            is_dense
        });
        is_dense || self.memory.bytes() == 0
    }

    /// A tensor on the host in row-major order without gaps; an error if it is elsewhere or strided.
    pub(crate) fn dense_host(&self, operator: &'static str, name: &str) -> Result<&[u8]> {
        tilewright::ensure!(
            self.on_host,
            operator,
            "{name} is in the memory of device {}, expected host memory",
            self.memory.device()
        );
        tilewright::ensure!(
            self.is_dense(),
            operator,
            "{name} has shape {:?} with strides {:?}, expected a contiguous tensor",
            self.shape,
            self.strides
        );
        Ok(self.bytes())
    }

    /// The elements in row-major order, copied if they are strided.
    pub(crate) fn compact(&self) -> Cow<'_, [u8]> {
        if self.is_dense() {
            return self.bytes().into();
        }
        let (size, bytes) = (self.dtype.size(), self.bytes());
        let mut copied = Vec::with_capacity(self.len() * size);
        let mut index = vec![0; self.shape.len()];
        for _ in 0..self.len() {
            let at: usize = index.iter().zip(&*self.strides).map(|(i, stride): (&usize, _)| i * stride).sum();
            copied.extend_from_slice(&bytes[at * size..(at + 1) * size]);
            for axis in (0..index.len()).rev() {
                index[axis] += 1;
                if index[axis] < self.shape[axis] {
                    break;
                }
                index[axis] = 0;
            }
        }
        copied.into()
    }

    pub(crate) fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Splits keys and values along axis 1: keeps the keys and returns the values, without that axis.
    pub(crate) fn split_off_values(&mut self) -> Result<Self> {
        tilewright::ensure!(
            self.shape.get(1) == Some(&2),
            OPERATOR,
            "the cache has shape {:?}, expected [num_pages, 2, ...]",
            self.shape
        );
        self.shape.remove(1);
        let distance = (self.strides.remove(1) * self.dtype.size()) as u64;
        let bytes = span(&self.shape, &self.strides, self.dtype.size()).unwrap_or(0);
        let values = self.part(if bytes == 0 { 0 } else { distance }, bytes);
        self.memory = self.part(0, bytes);
        Ok(Self { memory: values, ..*self })
    }

    /// The tensor with an extent of 0 at `axis`, which has no memory.
    pub(crate) fn emptied(&self, axis: usize) -> Self {
        let mut shape = self.shape;
        if let Some(extent) = shape.get_mut(axis) {
            *extent = 0;
        }
        Self { memory: self.part(0, 0), shape, ..*self }
    }

    /// A part of the memory, within its span.
    fn part(&self, offset: u64, bytes: usize) -> DeviceMemory {
        // SAFETY: as in `new`, which checked the span.
        #[allow(unsafe_code, reason = "a part of the memory of a Python object")]
        unsafe {
            DeviceMemory::from_raw(self.memory.address() + offset, bytes, self.memory.device(), None)
        }
    }
}

/// Prefixes the message of a view's error with operator and argument.
fn named(operator: &'static str, name: &str, error: Error) -> Error {
    Error::new(operator, format!("{name}: {}", error.message()))
}

impl<'py> FromPyObject<'_, 'py> for TensorArg {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Some(arg) = Self::exported(&object)? {
            return Ok(arg);
        }
        let (kind, expected) =
            (object.get_type().qualname()?, "a NumPy array, a torch tensor or an object with __dlpack__");
        Err(invalid(OPERATOR, format!("{kind} is not a tensor, expected {expected}")))
    }
}

impl TensorArg {
    /// The tensor that an object describes or exports; `None` if it does neither.
    pub(crate) fn exported(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        if let Some(arg) = dlpack::borrowed(object)? {
            if arg.dtype.has_gradients() {
                torch::check_gradient(object)?;
                torch::check_sign(object, &arg.shape, &arg.strides)?;
            }
            return Ok(Some(arg));
        }
        if let Some(interface) = object.getattr_opt("__array_interface__")? {
            return Self::from_interface(object, &interface, HOST).map(Some);
        }
        if let Some(address) = object.getattr_opt("data_ptr")? {
            return torch::tensor(object, &address).map(Some);
        }
        if let Some(interface) = object.getattr_opt("__cuda_array_interface__")? {
            let device = object.getattr_opt("device")?.and_then(|device| device.getattr("id").ok());
            let device = device.map_or(Ok(0), |id| id.extract::<i64>())?;
            return Self::from_interface(object, &interface, device).map(Some);
        }
        if object.hasattr("__dlpack__")? {
            return dlpack::exported(object.py(), object).map(Some);
        }
        Ok(None)
    }

    /// Reads the array interface of NumPy, version 3, or that of CUDA arrays.
    fn from_interface(
        object: &Bound<'_, PyAny>,
        interface: &Bound<'_, PyAny>,
        device: i64,
    ) -> PyResult<Self> {
        let interface = interface.cast::<PyDict>()?;
        let missing = |key: &str| invalid(OPERATOR, format!("the array interface has no {key}"));
        let item = |key: &'static str| interface.get_item(key)?.ok_or_else(|| missing(key));
        let (address, readonly): (u64, bool) = item("data")?.extract()?;
        let shape: Vec<i64> = item("shape")?.extract()?;
        let typestr: String = item("typestr")?.extract()?;
        check_byte_order(&typestr)?;
        let dtype = match TensorDtype::of_typestr(&typestr) {
            Ok(dtype) => dtype,
            // types that NumPy does not have, as those of ml_dtypes, only have a name
            Err(unknown) => match object.getattr_opt("dtype")?.and_then(|dtype| dtype.getattr("name").ok()) {
                Some(name) => TensorDtype::named(&name.extract::<String>()?)?,
                None => return Err(unknown),
            },
        };
        let steps: Option<Vec<i64>> = match interface.get_item("strides")? {
            Some(steps) if !steps.is_none() => Some(steps.extract()?),
            _ => None,
        };
        let size = dtype.size() as i64;
        if let Some(odd) = steps.iter().flatten().find(|step| **step % size != 0) {
            return Err(invalid(OPERATOR, format!("a stride of {odd} bytes is not a multiple of {size}")));
        }
        let strides: Option<Vec<i64>> = steps.map(|steps| steps.iter().map(|step| step / size).collect());
        let (shape, strides) = (&shape[..], strides.as_deref());
        Self::new(TensorFields { address, dtype, shape, strides, device, readonly })
    }
}
