//! Integer tensors where they are: on the host or in device memory.

use crate::{dtype::TensorDtype, tensor::TensorArg};
use bytemuck::Pod;
use tilewright::{
    Error, Result,
    tensor::{IndicesMut, Integers},
};

/// Integers of the engine, with the dtypes of tensors that hold them.
pub(crate) trait IntegerType: Pod {
    const DTYPES: &[TensorDtype];
    const EXPECTED: &str;
}

impl IntegerType for i32 {
    const DTYPES: &[TensorDtype] = &[TensorDtype::I32];
    const EXPECTED: &str = "int32";
}

impl IntegerType for u64 {
    const DTYPES: &[TensorDtype] = &[TensorDtype::I64, TensorDtype::U64];
    const EXPECTED: &str = "int64 or uint64";
}

impl TensorArg {
    /// The elements of a contiguous tensor of one axis.
    pub(crate) fn integers<T: IntegerType>(
        &self,
        operator: &'static str,
        name: &str,
    ) -> Result<Integers<'_, T>> {
        self.check_integers::<T>(operator, name)?;
        match self.device_memory() {
            Some(memory) => memory.integers(0, self.len()),
            None => {
                let values: &[T] = bytemuck::try_cast_slice(self.bytes())
                    .map_err(|why| Error::new(operator, format!("{name}: {why}")))?;
                Ok(values.into())
            }
        }
    }

    /// The elements of a contiguous writable tensor of one axis.
    pub(crate) fn indices_mut(&mut self, operator: &'static str, name: &str) -> Result<IndicesMut<'_>> {
        self.check_integers::<i32>(operator, name)?;
        self.check_writable(operator, name)?;
        let len = self.len();
        if !self.on_host() {
            return self.memory_mut().indices_mut(0, len);
        }
        let values: &mut [i32] = bytemuck::try_cast_slice_mut(self.bytes_mut())
            .map_err(|why| Error::new(operator, format!("{name}: {why}")))?;
        Ok(values.into())
    }

    fn check_integers<T: IntegerType>(&self, operator: &'static str, name: &str) -> Result<()> {
        let is_contiguous = self.span().end - self.span().start == (size_of::<T>() * self.len()) as u64;
        tilewright::ensure!(
            T::DTYPES.contains(&self.dtype()) && self.shape().len() == 1 && is_contiguous,
            operator,
            "{name} is {} of shape {:?} with strides {:?}, expected contiguous {} of one axis",
            self.dtype(),
            self.shape(),
            self.strides(),
            T::EXPECTED
        );
        Ok(())
    }
}
