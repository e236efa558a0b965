//! Launch signature of a kernel: parameters, threads, clusters, shared memory.

use super::{DriverError, Result, error::driver, handle::optional};
use cudarc::driver::sys;
use tilewright_ptx::{
    ir::{Kernel, Param, ParamKind},
    isa::{Op, sync::SyncOp, types::Class},
    sim::Arg,
};

#[derive(Debug)]
pub(super) struct Signature {
    pub(super) threads: u32,
    pub(super) cluster: u32,
    /// Bytes of dynamic shared memory.
    pub(super) shared: u32,
    /// Whether it executes `griddepcontrol.wait`, so that it may start before its predecessor ends.
    pub(super) waits: bool,
    params: Vec<Param>,
}

impl Signature {
    pub(super) fn of(kernel: &Kernel) -> Self {
        let mut waits = false;
        kernel.for_each(|inst| waits |= inst.op == Op::Sync(SyncOp::WaitForPrerequisites));
        Self {
            threads: kernel.threads,
            cluster: kernel.cluster,
            shared: kernel.shared_layout().1 as u32,
            waits,
            params: kernel.params.clone(),
        }
    }

    /// Compares the parameters with those of the machine code, if the driver reports these.
    pub(super) fn check(&self, function: sys::CUfunction) -> std::result::Result<(), String> {
        let Some(info) = optional().func_get_param_info else { return Ok(()) };
        let (mut offset, mut found) = (0, 0);
        // SAFETY: the function exists, and both output locations are valid.
        let mut bytes = |at| match unsafe { info(function, at, &mut offset, &mut found) } {
            sys::CUresult::CUDA_SUCCESS => Some(found),
            _ => None,
        };
        for (at, param) in self.params.iter().enumerate() {
            let expected = param_bytes(param.kind);
            match bytes(at) {
                Some(found) if found == expected => {}
                Some(found) => {
                    let name = &param.name;
                    return Err(format!(
                        "parameter {name} has {expected} bytes, that of its machine code {found}"
                    ));
                }
                None => {
                    let count = self.params.len();
                    return Err(format!("it has {count} parameters, its machine code {at}"));
                }
            }
        }
        match bytes(self.params.len()) {
            Some(_) => Err(format!("it has {} parameters, its machine code more", self.params.len())),
            None => Ok(()),
        }
    }

    /// Sets the function attributes that launches require.
    pub(super) fn prepare(&self, function: sys::CUfunction) -> Result<()> {
        use sys::CUfunction_attribute::{
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED,
            CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED as LARGE_CLUSTERS,
        };
        // SAFETY: the function exists.
        unsafe {
            driver!(cuFuncSetAttribute(function, SHARED, self.shared.cast_signed()))?;
            if self.cluster > 8 {
                driver!(cuFuncSetAttribute(function, LARGE_CLUSTERS, 1))?;
            }
        }
        Ok(())
    }

    /// Checks a launch by the rules of the driver, and by those that the driver does not check.
    pub(super) fn check_launch(&self, name: &str, grid: [u32; 3], args: &[Arg]) -> Result<()> {
        let refused = |why| Err(DriverError::new(format!("launch of kernel {name}"), why));
        let [x, y, z] = grid;
        if !(1..=0x7fff_ffff).contains(&x) || !(1..=0xffff).contains(&y) || !(1..=0xffff).contains(&z) {
            return refused(format!(
                "a grid of {x} x {y} x {z} CTAs: there are 1..=2147483647 x 1..=65535 x 1..=65535"
            ));
        }
        if !x.is_multiple_of(self.cluster) {
            return refused(format!(
                "a grid of {x} CTAs in x cannot be cut into clusters of {}",
                self.cluster
            ));
        }
        if args.len() != self.params.len() {
            return refused(format!(
                "{} arguments came, it has {} parameters",
                args.len(),
                self.params.len()
            ));
        }
        for (param, arg) in self.params.iter().zip(args) {
            if param.kind != kind(arg) {
                return refused(format!("parameter {} is {:?}, but {arg:?} came", param.name, param.kind));
            }
            if let Arg::TensorMap(map) = arg
                && let Err(why) = map.check()
            {
                return refused(format!("parameter {}: {why}", param.name));
            }
        }
        Ok(())
    }
}

fn kind(arg: &Arg) -> ParamKind {
    match arg {
        Arg::U32(_) | Arg::I32(_) | Arg::F32(_) => ParamKind::Value(Class::B32),
        Arg::U64(_) => ParamKind::Value(Class::B64),
        Arg::TensorMap(_) => ParamKind::TensorMap,
    }
}

fn param_bytes(kind: ParamKind) -> usize {
    match kind {
        ParamKind::Value(class) => class.bytes(),
        ParamKind::TensorMap => 128,
    }
}
