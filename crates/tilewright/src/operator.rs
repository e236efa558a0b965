//! Operators as data: a struct whose fields are the arguments of one call.
//!
//! [`Operator::run`] validates the arguments once, then passes the struct to the backend's method of that operator.

use crate::{
    Backend, Dtype, Error, ErrorKind, Result, View, ViewMut, Workspace,
    tensor::{DeviceAddress, DeviceMemory, Indices, IndicesMut, Integers},
};

/// A tensor argument of an operator.
#[derive(Debug)]
pub enum TensorRef<'v, 'a> {
    /// A tensor that is only read.
    Input(&'v mut View<'a>),
    /// A tensor that is written.
    Output(&'v mut ViewMut<'a>),
    /// Indices, which a device backend also takes from host memory.
    Indices(&'v mut Indices<'a>),
    /// Seeds or counters, as indices.
    Counters(&'v mut Integers<'a, u64>),
    /// A slot mapping, as indices.
    Slots(&'v mut Integers<'a, i64>),
    /// Indices that are written.
    IndicesOut(&'v mut IndicesMut<'a>),
    /// The workspace of attention.
    Workspace(&'v mut &'a mut Workspace),
}

impl TensorRef<'_, '_> {
    /// The device address; `None` for host memory.
    pub fn device(&self) -> Option<DeviceAddress> {
        match self {
            Self::Input(view) => view.device(),
            Self::Output(view) => view.device(),
            Self::Indices(indices) => indices.device(),
            Self::Counters(counters) => counters.device(),
            Self::Slots(slots) => slots.device(),
            Self::IndicesOut(indices) => indices.as_indices().device(),
            Self::Workspace(workspace) => workspace.device().map(DeviceMemory::device_address),
        }
    }
}

/// Called with the name and the tensor of each argument of an operator.
pub type TensorVisitor<'v, 'a> = dyn FnMut(&str, TensorRef<'_, 'a>) -> Result<()> + 'v;

/// The arguments of one call of an operator; `'a` is the lifetime of its tensors.
pub trait Operator<'a>: Sized {
    /// The operator name in error texts.
    fn name(&self) -> &'static str;

    /// Validates all arguments except the memory of tensors, which the backend checks.
    ///
    /// # Errors
    /// When an argument is invalid.
    fn check(&self) -> Result<()>;

    /// Visits each tensor argument, which `visit` may replace by one of equal shape, strides and dtype.
    ///
    /// # Errors
    /// Those of `visit`.
    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()>;

    /// The name in profiles: matrix products add the shape of their weights.
    fn profile_name(&self) -> String {
        self.name().to_owned()
    }

    /// The bytes that a call reads and writes: those of all its tensors, unless it uses only a part of one.
    fn num_bytes(&mut self) -> usize {
        tensor_bytes(self)
    }

    /// Calls the backend's method of this operator, which relies on a successful [`Operator::check`].
    ///
    /// # Errors
    /// When the device fails, or a tensor is in the memory of another one.
    fn dispatch<B: Backend + ?Sized>(self, backend: &B) -> Result<()>;

    /// Validates the arguments and executes the operator.
    ///
    /// # Errors
    /// Those of [`Operator::check`] and [`Operator::dispatch`].
    fn run<B: Backend + ?Sized>(self, backend: &B) -> Result<()> {
        self.check()?;
        self.dispatch(backend)
    }
}

/// The bytes of all tensor arguments but the workspace.
pub(crate) fn tensor_bytes<'a>(operator: &mut impl Operator<'a>) -> usize {
    let mut bytes = 0;
    let of = |shape: &[usize], dtype: Dtype| shape.iter().product::<usize>() * dtype.size();
    // the visitor returns no error
    let _ = operator.views(&mut |_, tensor| {
        bytes += match tensor {
            TensorRef::Input(view) => of(view.shape(), view.dtype()),
            TensorRef::Output(view) => of(view.shape(), view.dtype()),
            TensorRef::Indices(indices) => indices.len() * size_of::<i32>(),
            TensorRef::IndicesOut(indices) => indices.as_indices().len() * size_of::<i32>(),
            TensorRef::Counters(counters) => counters.len() * size_of::<u64>(),
            TensorRef::Slots(slots) => slots.len() * size_of::<i64>(),
            TensorRef::Workspace(_) => 0,
        };
        Ok(())
    });
    bytes
}

/// The name of a matrix product with the shape of its weights, for profiles.
pub(crate) fn shape_name(operator: &str, shape: &[usize]) -> String {
    format!("{operator} {}x{}", shape[0], shape[1])
}

/// Implements [`Operator::dispatch`] by a method of the backend.
macro_rules! dispatch {
    ($method:ident) => {
        fn dispatch<B: $crate::Backend + ?Sized>(self, backend: &B) -> $crate::Result<()> {
            backend.$method(self)
        }
    };
}
pub(crate) use dispatch;

/// The error of an optional operator that a backend lacks.
pub(crate) fn unsupported(operator: &'static str, backend: &str) -> Error {
    Error::new(operator, format!("{backend} does not have this operator")).with_kind(ErrorKind::Unsupported)
}

/// Rejects an operator with a tensor in device memory, for a backend that computes in host memory.
pub(crate) fn on_host<'a, O: Operator<'a>>(mut operator: O) -> Result<O> {
    let name = operator.name();
    operator.views(&mut |argument, tensor| match tensor.device() {
        None => Ok(()),
        Some(at) => {
            let text = format!("{argument} is in the memory of device {}, expected host memory", at.device);
            Err(Error::new(name, text))
        }
    })?;
    Ok(operator)
}
