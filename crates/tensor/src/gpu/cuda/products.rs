//! Single products by cuBLASLt.
//!
//! The library takes tens of microseconds to choose an algorithm, longer than many a product takes, and experts' counts of rows
//! are new in each step. So one is chosen for all products that differ in little but how many rows they have or sum over, by
//! sizes that stand for them: which of them comes first must not decide on the bits of a sum.

use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::result::{self as lt, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t as ComputeType, cublasLtMatmulAlgo_t as Algorithm,
    cublasLtMatmulDescAttributes_t as DescriptionAttribute,
    cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute, cublasLtReductionScheme_t as ReductionScheme,
    cublasStatus_t as Status, cudaDataType_t as DataType,
};
use cudarc::driver::{CudaContext, CudaStream, result};

use super::{LibraryError, done, failed};
use crate::dtype::Dtype;
use crate::gpu::error::EngineError;
use crate::gpu::{DeviceMatrix, DeviceProduct};

/// Streams that share products of which none waits for another: at its end, a product leaves most of a GPU idle. More of them
/// than two are slower again (BENCHMARKS.md).
pub(super) const LANES: usize = 2;
/// Memory that a product may put partial sums into, at most; and the part of a GPU's memory that it is at most.
const WORKSPACE_BYTES: usize = 32 << 20;
const WORKSPACE_PART: usize = 1 << 10;
/// What a matrix' address has to be a multiple of for every algorithm.
const ALIGN_BYTES: u64 = 16;

impl LibraryError for CublasError {
    fn told(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// What products of one algorithm have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ProductKind {
    /// Rows, inner length and columns that stand for them.
    dims: [usize; 3],
    are_transposed: [bool; 2],
    /// Of factors and of the result.
    types: [Dtype; 2],
    /// Bytes that addresses of a, b and c are multiples of.
    alignments: [u32; 3],
}

impl ProductKind {
    fn of(product: &DeviceProduct) -> ProductKind {
        let DeviceProduct { c, a, b, .. } = product;
        let [rows, inner, cols] = product.dims();
        // Where a size is the length of no matrix' lines, algorithms take any.
        let rows = if a.transposed { rows } else { about(rows) };
        let inner = if a.transposed && !b.transposed { about(inner) } else { inner };
        let alignment = |of: &DeviceMatrix| 1 << (of.address() | ALIGN_BYTES).trailing_zeros();
        ProductKind {
            dims: [rows, inner, cols],
            are_transposed: [a.transposed, b.transposed],
            types: [a, c].map(|of| of.elements.dtype()),
            alignments: [a, b, c].map(alignment),
        }
    }
}

/// The next number with at most four binary digits before its zeros.
fn about(n: usize) -> usize {
    n.next_multiple_of(1 << n.max(1).ilog2().saturating_sub(3))
}

/// How a matrix of these sizes lies in memory, to a library that reads columns one after the other: as its transpose.
#[derive(Debug)]
struct MatrixLayout(sys::cublasLtMatrixLayout_t);

impl MatrixLayout {
    fn new(dtype: Dtype, [rows, cols]: [usize; 2]) -> Result<MatrixLayout, CublasError> {
        let cols = cols.max(1);
        lt::create_matrix_layout(data_type(dtype), cols as u64, rows as u64, cols as i64).map(MatrixLayout)
    }

    /// Of a, b and c of a product of these sizes.
    fn of_product([rows, inner, cols]: [usize; 3], kind: &ProductKind) -> Result<[MatrixLayout; 3], CublasError> {
        let stored = |[rows, cols]: [usize; 2], is_transposed| if is_transposed { [cols, rows] } else { [rows, cols] };
        let ([factors, of_c], [a, b]) = (kind.types, kind.are_transposed);
        Ok([
            MatrixLayout::new(factors, stored([rows, inner], a))?,
            MatrixLayout::new(factors, stored([inner, cols], b))?,
            MatrixLayout::new(of_c, [rows, cols])?,
        ])
    }
}

impl Drop for MatrixLayout {
    fn drop(&mut self) {
        // Nobody is left to be told of a failure, here and below.
        // SAFETY: the layout is there, and calls read it before they return.
        let _ = unsafe { lt::destroy_matrix_layout(self.0) };
    }
}

/// A product of factors of which either may be read as its transpose: sums in f32, of f32 without TF32.
#[derive(Debug)]
struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    fn new([a, b]: [bool; 2]) -> Result<Description, CublasError> {
        let made = Description(lt::create_matmul_desc(ComputeType::CUBLAS_COMPUTE_32F, DataType::CUDA_R_32F)?);
        // c^T = b^T a^T: b comes first.
        let factors = [
            (DescriptionAttribute::CUBLASLT_MATMUL_DESC_TRANSA, b),
            (DescriptionAttribute::CUBLASLT_MATMUL_DESC_TRANSB, a),
        ];
        for (attribute, is_transposed) in factors {
            let operation = i32::from(is_transposed);
            // SAFETY: the description is there, and the number is read at once.
            unsafe {
                lt::set_matmul_desc_attribute(made.0, attribute, (&raw const operation).cast(), size_of::<i32>())?
            };
        }
        Ok(made)
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = unsafe { lt::destroy_matmul_desc(self.0) };
    }
}

/// What an algorithm may do.
#[derive(Debug)]
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(workspace: usize, kind: &ProductKind) -> Result<Preference, CublasError> {
        let made = Preference(lt::create_matmul_pref()?);
        made.set(PreferenceAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(workspace as u64))?;
        // Sums that are taken in parts are f32, too: not of the result's type.
        let in_f32 = ReductionScheme::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        made.set(PreferenceAttribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &in_f32)?;
        let [a, b, c] = kind.alignments;
        made.set(PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &b)?;
        made.set(PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &a)?;
        made.set(PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &c)?;
        made.set(PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &c)?;
        Ok(made)
    }

    fn set<T>(&self, attribute: PreferenceAttribute, value: &T) -> Result<(), CublasError> {
        // SAFETY: the preference is there, and the value, which has the attribute's type, is read at once.
        unsafe { lt::set_matmul_pref_attribute(self.0, attribute, std::ptr::from_ref(value).cast(), size_of::<T>()) }
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = unsafe { lt::destroy_matmul_pref(self.0) };
    }
}

/// A stream of products, and the memory that they have for partial sums.
#[derive(Debug)]
struct ProductLane {
    stream: Arc<CudaStream>,
    workspace: u64,
}

/// What multiplies.
#[derive(Debug)]
pub(super) struct Products {
    // Dropped before the handle.
    descriptions: [Description; 4],
    handle: Handle,
    lanes: Vec<ProductLane>,
    workspace_bytes: usize,
    algorithms: HashMap<ProductKind, Algorithm>,
    /// Sizes that have refused the algorithm of those that stand for them.
    refused: HashSet<ProductKind>,
    context: Arc<CudaContext>,
}

// SAFETY: the library's objects may be used by any thread, one at a time.
unsafe impl Send for Products {}

#[derive(Debug)]
struct Handle(sys::cublasLtHandle_t);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle is there and used by nobody else.
        let _ = unsafe { lt::destroy_handle(self.0) };
    }
}

impl Products {
    /// On these streams of a GPU with so many bytes of memory.
    pub(super) fn new(
        context: &Arc<CudaContext>,
        streams: [Arc<CudaStream>; LANES],
        bytes: usize,
    ) -> Result<Products, EngineError> {
        let wrong = |error| failed("starting cuBLASLt", error);
        let handle = Handle(lt::create_handle().map_err(wrong)?);
        let description = |b, a| Description::new([a, b]).map_err(wrong);
        let descriptions = [
            description(false, false)?,
            description(true, false)?,
            description(false, true)?,
            description(true, true)?,
        ];
        let workspace_bytes = (bytes / WORKSPACE_PART).min(WORKSPACE_BYTES);
        let (lanes, algorithms, refused, context) = (Vec::new(), HashMap::new(), HashSet::new(), context.clone());
        let mut products = Products { descriptions, handle, lanes, workspace_bytes, algorithms, refused, context };
        for stream in streams {
            // SAFETY: nobody reads what nobody has written.
            let workspace = unsafe { result::malloc_sync(workspace_bytes.max(1)) };
            let workspace = workspace.map_err(|error| failed("taking memory for products", error))?;
            products.lanes.push(ProductLane { stream, workspace });
        }
        Ok(products)
    }

    /// Begins a product on the stream of this number. The device's context is the thread's.
    pub(super) fn multiply(&mut self, lane: usize, product: &DeviceProduct) {
        let dims = product.dims();
        let bytes = dims[0] * dims[2] * product.c.elements.dtype().bytes();
        if dims.contains(&0) {
            // A sum of nothing, which the library does not promise to know.
            if bytes > 0 && !product.accumulate {
                // SAFETY: the matrix lies in its memory, as `dims` has checked.
                let zeros = unsafe {
                    result::memset_d8_async(product.c.address(), 0, bytes, self.lanes[lane].stream.cu_stream())
                };
                done(zeros, "zeros");
            }
            return;
        }
        let kind = ProductKind::of(product);
        let own = ProductKind { dims, ..kind };
        let mut begun = Err(CublasError(Status::CUBLAS_STATUS_NOT_SUPPORTED));
        if !self.refused.contains(&own) {
            begun = self.begin_by(lane, product, &kind);
        }
        if let Err(CublasError(Status::CUBLAS_STATUS_NOT_SUPPORTED | Status::CUBLAS_STATUS_INVALID_VALUE)) = begun {
            // An algorithm that does not take these very sizes: one of their own, for them alone.
            self.refused.insert(own);
            begun = self.begin_by(lane, product, &own);
        }
        done(begun, "a product");
    }

    /// By the algorithm of a kind.
    fn begin_by(&mut self, lane: usize, product: &DeviceProduct, kind: &ProductKind) -> Result<(), CublasError> {
        let algorithm = self.algorithm(kind)?;
        self.begin(lane, product, kind, &algorithm)
    }

    fn algorithm(&mut self, kind: &ProductKind) -> Result<Algorithm, CublasError> {
        if let Some(algorithm) = self.algorithms.get(kind) {
            return Ok(*algorithm);
        }
        let algorithm = self.choose(kind)?;
        self.algorithms.insert(*kind, algorithm);
        Ok(algorithm)
    }

    fn choose(&self, kind: &ProductKind) -> Result<Algorithm, CublasError> {
        let [a, b, c] = MatrixLayout::of_product(kind.dims, kind)?;
        let preference = Preference::new(self.workspace_bytes, kind)?;
        let description = self.description(kind);
        // SAFETY: all of them are there.
        let chosen =
            unsafe { lt::get_matmul_algo_heuristic(self.handle.0, description, b.0, a.0, c.0, c.0, preference.0) };
        Ok(chosen?.algo)
    }

    fn description(&self, kind: &ProductKind) -> sys::cublasLtMatmulDesc_t {
        let [a, b] = kind.are_transposed.map(usize::from);
        self.descriptions[2 * a + b].0
    }

    fn begin(
        &self,
        lane: usize,
        product: &DeviceProduct,
        kind: &ProductKind,
        algorithm: &Algorithm,
    ) -> Result<(), CublasError> {
        let [of_a, of_b, of_c] = MatrixLayout::of_product(product.dims(), kind)?;
        let DeviceProduct { c, a, b, accumulate } = product;
        let (one, keep) = (1.0f32, f32::from(u8::from(*accumulate)));
        let (lane, c) = (&self.lanes[lane], c.address() as *mut c_void);
        // SAFETY: the matrices lie in their memory, as `dims` has checked; numbers and layouts are read before the call returns,
        // and products of a lane, which share its workspace, come one after the other.
        unsafe {
            lt::matmul(
                self.handle.0,
                self.description(kind),
                (&raw const one).cast(),
                (&raw const keep).cast(),
                b.address() as *const c_void,
                of_b.0,
                a.address() as *const c_void,
                of_a.0,
                c,
                of_c.0,
                c,
                of_c.0,
                algorithm,
                lane.workspace as *mut c_void,
                self.workspace_bytes,
                lane.stream.cu_stream().cast(),
            )
        }
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: `new` took the memory; the driver waits for what uses it.
        let free = |lane: &ProductLane| unsafe { result::free_sync(lane.workspace) };
        let _ = self.context.bind_to_thread().map(|()| self.lanes.iter().try_for_each(free));
    }
}

fn data_type(dtype: Dtype) -> DataType {
    match dtype {
        Dtype::Bf16 => DataType::CUDA_R_16BF,
        _ => DataType::CUDA_R_32F,
    }
}

#[cfg(test)]
mod tests {
    use super::about;

    #[test]
    fn sizes_that_stand_for_others_have_four_digits() {
        let pairs =
            [(0, 0), (1, 1), (15, 15), (16, 16), (17, 18), (1000, 1024), (1025, 1152), (1536, 1536), (1537, 1664)];
        assert_eq!(pairs.map(|(n, _)| about(n)), pairs.map(|(_, about)| about));
    }
}
