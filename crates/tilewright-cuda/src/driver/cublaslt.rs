//! cuBLASLt, if the loader finds it: products of 16-bit elements with more rows than our own kernels are tuned for.
//!
//! It is loaded at run time, at its first possible use. If it is missing or has no algorithm for a product, `multiply` does
//! nothing and returns false.
//!
//! Its matrices are column-major, ours row-major: `out = x · weightᵀ` becomes `outᵀ = weight · xᵀ`.

use super::{DriverError, ErrorKind, Handle, Memory, Result, Stream, handle::lock};
use cudarc::cublaslt::{
    result::{self, CublasError},
    sys,
};
use std::{
    collections::{HashMap, hash_map::Entry},
    ffi::c_void,
    sync::{Arc, Mutex, OnceLock},
};
use tilewright::Dtype;
use tilewright_kernels::gemm::GemmParams;

/// Workspace bytes: NVIDIA's recommendation for Hopper.
const WORKSPACE: usize = 32 << 20;
/// Products with at most this many rows use our own kernels.
const MAX_OWN_ROWS: u32 = 16;
/// `CUBLAS_OP_T` of cublas_api.h.
const TRANSPOSE: i32 = 1;
/// Maximum number of cached algorithms; prompts have many different lengths.
const MAX_PLANS: usize = 1024;

/// cuBLASLt on a stream, opened on first use. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct CublasLt {
    stream: Stream,
    /// The library, or the reason why it is unavailable.
    library: Arc<OnceLock<std::result::Result<Library, String>>>,
}

/// The opened library.
#[derive(Debug)]
struct Library {
    handle: Handle<sys::cublasLtContext>,
    /// 120803 is 12.8.3.
    version: usize,
    workspace: Memory,
    /// Algorithms per problem; `None` if the library has none.
    plans: Mutex<HashMap<MatmulKey, Option<MatmulPlan>>>,
}

/// The parameters that an algorithm depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct MatmulKey {
    shape: [u32; 3],
    /// Strides of x, the weight and the result.
    strides: [u64; 3],
    /// Element types of both inputs, and of the result.
    dtypes: [Dtype; 2],
    bias: bool,
}

/// An algorithm with its matrix descriptors.
#[derive(Debug)]
struct MatmulPlan {
    product: Handle<sys::cublasLtMatmulDescOpaque_t>,
    /// Layouts of the weight, x and the result.
    layouts: [Handle<sys::cublasLtMatrixLayoutOpaque_t>; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// Converts an error of the library's function `call`.
fn refused(call: &str) -> impl Fn(CublasError) -> DriverError + '_ {
    move |why| DriverError::of(ErrorKind::Driver, call, why.to_string())
}

impl CublasLt {
    /// Does not open the library yet.
    pub(crate) fn new(stream: &Stream) -> Self {
        Self { stream: stream.clone(), library: Arc::default() }
    }

    /// The state of the library, for people.
    pub(crate) fn describe(&self) -> String {
        match self.library.get() {
            None => "cuBLASLt not loaded yet".to_owned(),
            Some(Ok(library)) => {
                let version = library.version;
                format!("cuBLASLt {}.{} for products of many rows", version / 10_000, version / 100 % 100)
            }
            Some(Err(why)) => format!("own kernels for all products: {why}"),
        }
    }

    /// Computes `product` in stream order. Returns false, with nothing submitted, if the library cannot compute it.
    ///
    /// # Errors
    /// If the library or the driver fails.
    pub(crate) fn multiply(&self, product: &GemmParams) -> Result<bool> {
        let Some(key) = MatmulKey::of(product) else { return Ok(false) };
        let _current = self.stream.context().enter()?;
        // opening the library allocates, which must not become part of a graph
        if self.library.get().is_none() && self.stream.is_captured()? {
            return Ok(false);
        }
        match self.library.get_or_init(|| Library::open(&self.stream)) {
            Ok(library) => library.multiply(&self.stream, key, product),
            Err(_) => Ok(false),
        }
    }
}

impl MatmulKey {
    /// The key of a product that the library supports.
    fn of(product: &GemmParams) -> Option<Self> {
        let [rows, features, inputs] = product.shape;
        let (x, weight, out) = (product.x, product.weight, product.out);
        let elements = x.dtype == weight.dtype && x.dtype.size() == 2;
        let results = out.dtype == x.dtype || out.dtype == Dtype::F32;
        let bias = product.bias.is_none_or(|(dtype, at)| dtype == out.dtype && at.is_multiple_of(16));
        let aligned = [x, weight, out].iter().all(|matrix| {
            let bytes = matrix.stride.saturating_mul(matrix.dtype.size() as u64);
            matrix.address.is_multiple_of(16) && bytes.is_multiple_of(16)
        });
        let dense = x.stride >= u64::from(inputs)
            && weight.stride >= u64::from(inputs)
            && out.stride >= u64::from(features);
        let fits = rows > MAX_OWN_ROWS && inputs > 0 && product.groups.is_none();
        (elements && results && bias && aligned && dense && fits).then_some(Self {
            shape: product.shape,
            strides: [x.stride, weight.stride, out.stride],
            dtypes: [x.dtype, out.dtype],
            bias: product.bias.is_some(),
        })
    }
}

impl Library {
    /// Opens the library; the stream's context is current.
    fn open(stream: &Stream) -> std::result::Result<Self, String> {
        #[cfg(not(feature = "linked"))] // a linked program does not start without it
        // SAFETY: loads a library by name; its initializers are NVIDIA's.
        if !unsafe { sys::is_culib_present() } {
            return Err("the loader finds no cuBLASLt".to_owned());
        }
        let workspace = stream.allocate(WORKSPACE).map_err(|why| why.to_string())?;
        let handle = result::create_handle().map_err(|why| format!("cublasLtCreate: {why}"))?;
        // SAFETY: takes no arguments and only returns a number.
        let version = unsafe { sys::cublasLtGetVersion() };
        Ok(Self { handle: Handle(handle), version, workspace, plans: Mutex::default() })
    }

    fn multiply(&self, stream: &Stream, key: MatmulKey, product: &GemmParams) -> Result<bool> {
        let mut plans = lock(&self.plans);
        if plans.len() >= MAX_PLANS && !plans.contains_key(&key) {
            plans.clear();
        }
        let plan = match plans.entry(key) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(vacant) => vacant.insert(MatmulPlan::find(self.handle, key)?),
        };
        let Some(plan) = plan else { return Ok(false) };
        if let Some((_, bias)) = product.bias {
            plan.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        let (one, zero) = (1.0_f32, 0.0_f32);
        let [weight, x, out] = plan.layouts.map(|layout| layout.0);
        let address = |address: u64| address as *const c_void;
        // SAFETY: descriptors live as long as the plan, which is locked; the scalars are f32, as the descriptor states; the
        // caller guarantees the addresses, as for launches; the workspace lives as long as the library and is used by one stream
        // only.
        unsafe {
            result::matmul(
                self.handle.0,
                plan.product.0,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                address(product.weight.address),
                weight,
                address(product.x.address),
                x,
                address(product.out.address),
                out,
                product.out.address as *mut c_void,
                out,
                &raw const plan.algorithm,
                self.workspace.address() as *mut c_void,
                WORKSPACE,
                stream.raw().cast(),
            )
        }
        .map_err(refused("cublasLtMatmul"))?;
        Ok(true)
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: created by `open` and destroyed once. Errors are ignored: `Drop` cannot report them.
        let _ = unsafe { result::destroy_handle(self.handle.0) };
    }
}

fn element(dtype: Dtype) -> sys::cudaDataType {
    match dtype {
        Dtype::F16 => sys::cudaDataType::CUDA_R_16F,
        Dtype::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

impl MatmulPlan {
    /// The library's preferred algorithm; `None` if it has none.
    fn find(handle: Handle<sys::cublasLtContext>, key: MatmulKey) -> Result<Option<Self>> {
        let mut plan = Self::described(key)?;
        let preference = result::create_matmul_pref().map_err(refused("cublasLtMatmulPreferenceCreate"))?;
        let found = prefer(preference).and_then(|()| {
            let [weight, x, out] = plan.layouts.map(|layout| layout.0);
            // SAFETY: all descriptors were created above and live until the end of this function.
            unsafe {
                result::get_matmul_algo_heuristic(handle.0, plan.product.0, weight, x, out, out, preference)
            }
        });
        // SAFETY: created above and no longer used. Errors are ignored: the result is already known.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        match found {
            Ok(found) => {
                plan.algorithm = found.algo;
                Ok(Some(plan))
            }
            Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => Ok(None),
            Err(why) => Err(refused("cublasLtMatmulAlgoGetHeuristic")(why)),
        }
    }

    /// The matrix descriptors of a product, without an algorithm.
    fn described(key: MatmulKey) -> Result<Self> {
        use sys::cublasLtMatmulDescAttributes_t::{
            CUBLASLT_MATMUL_DESC_EPILOGUE as EPILOGUE, CUBLASLT_MATMUL_DESC_TRANSA as TRANSPOSED,
        };
        let [rows, features, inputs] = key.shape.map(u64::from);
        let [of_x, of_weight, of_out] = key.strides.map(u64::cast_signed);
        let [from, to] = key.dtypes.map(element);
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let product = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F)
            .map_err(refused("cublasLtMatmulDescCreate"))?;
        let none = Handle(std::ptr::null_mut());
        let algorithm = sys::cublasLtMatmulAlgo_t { data: [0; 8] };
        // owns the descriptors from here on, so that an early return destroys them
        let mut plan = Self { product: Handle(product), layouts: [none; 3], algorithm };
        let matrices =
            [(from, inputs, features, of_weight), (from, inputs, rows, of_x), (to, features, rows, of_out)];
        for (layout, (dtype, column, columns, stride)) in plan.layouts.iter_mut().zip(matrices) {
            let created = result::create_matrix_layout(dtype, column, columns, stride);
            *layout = Handle(created.map_err(refused("cublasLtMatrixLayoutCreate"))?);
        }
        plan.set(TRANSPOSED, &TRANSPOSE)?;
        if key.bias {
            plan.set(EPILOGUE, &sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS)?;
        }
        Ok(plan)
    }

    /// Sets an attribute of the product. `value` must have the type that the library documents for it.
    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<()> {
        // SAFETY: the descriptor is alive; the size is that of `value`.
        unsafe {
            let value: *const T = value;
            result::set_matmul_desc_attribute(self.product.0, attribute, value.cast(), size_of::<T>())
        }
        .map_err(refused("cublasLtMatmulDescSetAttribute"))
    }
}

impl Drop for MatmulPlan {
    fn drop(&mut self) {
        // SAFETY: created by `described` and destroyed once. Errors are ignored: `Drop` cannot report them.
        unsafe {
            for layout in self.layouts.iter().filter(|layout| !layout.0.is_null()) {
                let _ = result::destroy_matrix_layout(layout.0);
            }
            let _ = result::destroy_matmul_desc(self.product.0);
        }
    }
}

/// Sets the workspace size and an alignment of 16 bytes for all addresses.
fn prefer(preference: sys::cublasLtMatmulPreference_t) -> std::result::Result<(), CublasError> {
    use sys::cublasLtMatmulPreferenceAttributes_t::{
        CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES as A,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES as B, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES as C,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES as D,
    };
    let (bytes, aligned) = (WORKSPACE, 16_u32);
    // SAFETY: the preference is alive; the first attribute is a `size_t`, the others are 32-bit, as documented.
    unsafe {
        result::set_matmul_pref_attribute(preference, BYTES, (&raw const bytes).cast(), size_of::<usize>())?;
        for attribute in [A, B, C, D] {
            result::set_matmul_pref_attribute(preference, attribute, (&raw const aligned).cast(), 4)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::MatmulKey;
    use tilewright::Dtype;
    use tilewright_kernels::gemm::{GemmParams, Matrix};

    fn product() -> GemmParams {
        let matrix = |address| Matrix { dtype: Dtype::Bf16, address, stride: 64 };
        GemmParams {
            shape: [17, 64, 64],
            x: matrix(256),
            weight: matrix(512),
            bias: None,
            out: matrix(768),
            groups: None,
        }
    }

    #[test]
    fn unsupported_products_have_no_key() {
        assert!(MatmulKey::of(&product()).is_some());
        let not = |why: &str, product: GemmParams| assert_eq!(MatmulKey::of(&product), None, "{why}");
        not("few rows", GemmParams { shape: [16, 64, 64], ..product() });
        not("no inputs", GemmParams { shape: [17, 64, 0], ..product() });
        not("rows at one address", GemmParams { x: Matrix { stride: 0, ..product().x }, ..product() });
        not("an address", GemmParams { x: Matrix { address: 258, ..product().x }, ..product() });
        not("a stride", GemmParams { out: Matrix { stride: 65, ..product().out }, ..product() });
        not("f32", GemmParams { x: Matrix { dtype: Dtype::F32, ..product().x }, ..product() });
        not("f16 of bf16", GemmParams { out: Matrix { dtype: Dtype::F16, ..product().out }, ..product() });
        not("a bias of another dtype", GemmParams { bias: Some((Dtype::F32, 1024)), ..product() });
        assert!(MatmulKey::of(&GemmParams { bias: Some((Dtype::Bf16, 1024)), ..product() }).is_some());
    }
}
