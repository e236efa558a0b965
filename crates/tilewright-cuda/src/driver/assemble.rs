//! PTX to machine code, by the assembler in the driver.

use super::{Context, Error, ErrorKind, Result, error::driver, log::Log};
use cudarc::driver::sys;
use std::{
    ffi::{CString, c_void},
    ptr::{null_mut, slice_from_raw_parts, without_provenance_mut},
};

/// Machine code, and what the assembler said of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assembled {
    /// An ELF file, as `ptxas` makes them.
    pub cubin: Vec<u8>,
    /// Registers, spilled bytes and shared memory, in the assembler's words; warnings.
    pub log: String,
}

/// Machine code of the PTX of one kernel, which errors call `name`, for the context's GPU. May be called by several threads at
/// once.
///
/// # Errors
/// When the assembler refuses, with all that it says.
pub fn assemble(context: &Context, name: &str, ptx: &str) -> Result<Vec<u8>> {
    assemble_with_log(context, name, ptx).map(|assembled| assembled.cubin)
}

/// The same, with what the assembler says where it does not refuse.
///
/// # Errors
/// As [`assemble`].
pub fn assemble_with_log(context: &Context, name: &str, ptx: &str) -> Result<Assembled> {
    let text = CString::new(ptx).map_err(|why| {
        Error::of(ErrorKind::Kernel, format!("kernel {name}"), format!("its PTX has a byte 0: {why}"))
    })?;
    let _current = context.enter()?;
    Link::new(None).link(name, &text).or_else(|error| match architecture(ptx) {
        // the driver may take the context's GPU for one without the instructions that only this architecture has
        Some(target) if error.kind() == ErrorKind::Kernel => {
            Link::new(Some(target)).link(name, &text).map_err(|_| error)
        }
        _ => Err(error),
    })
}

/// What to load of a kernel, and to keep for the next time: its machine code, or its PTX where that comes out better.
///
/// The driver gives machine code away as its linker makes it, for other code to be linked to; so made, `setmaxnreg` does nothing
/// (`ptxas -c`: "ignored to maintain compatibility across compilation units"), and warpgroups that count on it spill. Text that is
/// loaded is assembled as the whole that it is. The driver keeps what comes of it in a cache of its own (`CUDA_CACHE_PATH`).
///
/// # Errors
/// As [`assemble`]; those of text come when it is loaded.
pub(crate) fn loadable(context: &Context, name: &str, ptx: &str) -> Result<Vec<u8>> {
    if moves_registers(ptx) { Ok(ptx.into()) } else { assemble(context, name, ptx) }
}

/// Whether warpgroups give registers to each other.
fn moves_registers(ptx: &str) -> bool {
    ptx.lines().any(|line| line.trim_start().starts_with("setmaxnreg."))
}

/// The architecture of a `.target` that ends with `a` or `f`, as `CUjit_target` counts: 0x10000 or 0x20000 more than the number.
fn architecture(ptx: &str) -> Option<usize> {
    let target = ptx.lines().find_map(|line| line.trim().strip_prefix(".target sm_"))?;
    let target = target.split(',').next()?.trim();
    let (of_one, of_family) = (target.strip_suffix('a'), target.strip_suffix('f'));
    let number = |text: Option<&str>, more: usize| text?.parse::<usize>().ok().map(|number| number + more);
    number(of_one, 0x1_0000).or(number(of_family, 0x2_0000))
}

/// A linking of one text, whose logs the driver writes to until it is destroyed.
struct Link {
    log: Log,
    options: (Vec<sys::CUjit_option>, Vec<*mut c_void>),
    state: sys::CUlinkState,
}

impl Link {
    fn new(target: Option<usize>) -> Self {
        let mut log = Log::new();
        let mut options = log.options();
        if let Some(target) = target {
            options.0.push(sys::CUjit_option::CU_JIT_TARGET);
            options.1.push(without_provenance_mut(target));
        }
        Self { log, options, state: null_mut() }
    }

    fn link(mut self, name: &str, text: &CString) -> Result<Assembled> {
        match self.cubin(text) {
            Ok(cubin) => Ok(Assembled { cubin, log: self.log.rest() }),
            Err(error) if error.kind() == ErrorKind::ContextLost => Err(error),
            Err(error) => {
                let said = self.log.errors();
                let error = error.within(format!("kernel {name}"));
                Err(error.with(ErrorKind::Kernel, &format!("\n{said}")))
            }
        }
    }

    fn cubin(&mut self, text: &CString) -> Result<Vec<u8>> {
        let (options, values) = &mut self.options;
        let source = text.as_bytes_with_nul();
        let (mut cubin, mut bytes) = (null_mut(), 0);
        // SAFETY: a context is current. Options come with as many values, of the kinds that they ask for, and live as long as
        // the state; so does the machine code, which is copied. The text is read only, and ends with 0.
        unsafe {
            driver!(cuLinkCreate_v2(
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
                &mut self.state
            ))?;
            driver!(cuLinkAddData_v2(
                self.state,
                sys::CUjitInputType::CU_JIT_INPUT_PTX,
                source.as_ptr().cast_mut().cast(),
                source.len(),
                c"kernel".as_ptr(),
                0,
                null_mut(),
                null_mut(),
            ))?;
            driver!(cuLinkComplete(self.state, &mut cubin, &mut bytes))?;
            Ok((*slice_from_raw_parts(cubin.cast::<u8>(), bytes)).to_vec())
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if !self.state.is_null() {
            // SAFETY: created with it. An error here has nobody to tell.
            let _ = unsafe { sys::cuLinkDestroy(self.state) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{architecture, moves_registers};

    #[test]
    fn registers_that_move_are_found_in_instructions_only() {
        assert!(moves_registers("{\n    setmaxnreg.dec.sync.aligned.u32 40;\n"));
        assert!(!moves_registers("{\n    // no setmaxnreg.dec here\n    ret;\n"));
    }

    #[test]
    fn the_architecture_of_a_target_is_counted_as_the_driver_does() {
        assert_eq!(architecture(".version 8.0\n.target sm_90a\n"), Some(0x1_005a));
        assert_eq!(architecture(".version 8.8\n.target sm_100f, debug\n"), Some(0x2_0064));
        assert_eq!(architecture(".version 8.0\n.target sm_80\n"), None);
        assert_eq!(architecture("no PTX"), None);
    }
}
