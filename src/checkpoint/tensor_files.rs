//! The tensors of a model in files, read by their names here, whether the files are laid out so or as another program does.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::Error;
use super::cut::TensorCut;
use super::element::ElementType;
use super::file_set::{FileSet, path_of};
use super::layout::TensorList;
use super::manifest::regular;
use super::packed::PackedWeight;

/// Where a tensor is in files of another layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorView {
    /// The name there.
    pub tensor: String,
    pub cut: TensorCut,
    /// How its elements are packed there, if they are.
    pub packed: Option<PackedWeight>,
    /// The shape and the type here.
    pub shape: Vec<usize>,
    pub dtype: ElementType,
}

impl TensorView {
    /// The tensors there that it is read from, with the shapes that they have.
    fn stored(&self) -> Vec<(&String, Vec<usize>)> {
        let whole = self.cut.whole(&self.shape);
        let Some(PackedWeight { packing, scales }) = &self.packed else { return vec![(&self.tensor, whole)] };
        let shapes = packing.shapes(&whole).expect("packed so");
        [&self.tensor, scales].into_iter().zip(shapes).collect()
    }

    /// The tensors there that it is read from, and how many elements of each are its own.
    pub fn parts(&self) -> impl Iterator<Item = (&String, u64)> {
        let own: u64 = self.shape.iter().product::<usize>() as u64;
        let all: u64 = self.cut.whole(&self.shape).iter().product::<usize>() as u64;
        let of = move |shape: Vec<usize>| shape.iter().product::<usize>() as u64 * own / all.max(1);
        self.stored().into_iter().map(move |(name, shape)| (name, of(shape)))
    }
}

/// What is added to a matrix when it is read: `scale b a`, of the tensors a `[r, in]` and b `[out, r]` of the same files.
#[derive(Clone, Debug, PartialEq)]
pub struct LowRankSum {
    pub a: String,
    pub b: String,
    pub scale: f32,
}

/// The files of tensors of one kind.
#[derive(Clone, Debug)]
pub struct TensorFiles {
    folder: PathBuf,
    set: FileSet,
    /// By their names here, tensors that are elsewhere; absent where names and shapes are the files' own.
    views: Option<BTreeMap<String, TensorView>>,
    /// By their names here, matrices that have something added. What it is made of is no tensor by itself.
    sums: BTreeMap<String, LowRankSum>,
}

impl TensorFiles {
    pub fn new(folder: &Path, set: FileSet) -> TensorFiles {
        TensorFiles { folder: folder.to_owned(), set, views: None, sums: BTreeMap::new() }
    }

    /// The same files read by other names.
    ///
    /// # Panics
    /// If a view does not fit the tensor that it is of.
    #[must_use]
    pub fn seen(self, views: BTreeMap<String, TensorView>) -> TensorFiles {
        for (view, (name, shape)) in
            views.values().flat_map(|view| view.stored().into_iter().map(move |one| (view, one)))
        {
            let entry = self.set.entry(name).map(|(_, entry)| entry);
            assert!(entry.is_some_and(|entry| entry.shape == shape), "{view:?} of {entry:?}");
        }
        TensorFiles { views: Some(views), ..self }
    }

    /// The same files with something added to matrices.
    #[must_use]
    pub fn summed(self, sums: BTreeMap<String, LowRankSum>) -> TensorFiles {
        TensorFiles { sums, ..self }
    }

    /// The files themselves.
    pub fn set(&self) -> &FileSet {
        &self.set
    }

    pub fn views(&self) -> Option<&BTreeMap<String, TensorView>> {
        self.views.as_ref()
    }

    /// All tensors by the names here.
    pub fn list(&self) -> TensorList {
        let mut list: TensorList = match &self.views {
            None => {
                self.set.entries().map(|(name, entry)| (name.clone(), (entry.dtype, entry.shape.clone()))).collect()
            }
            Some(views) => views.iter().map(|(name, view)| (name.clone(), (view.dtype, view.shape.clone()))).collect(),
        };
        self.sums.values().flat_map(|sum| [&sum.a, &sum.b]).for_each(|factor| drop(list.remove(factor)));
        list
    }

    /// Where the files are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The type that a tensor's elements have in the files.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn stored(&self, name: &str) -> ElementType {
        let name = self.views.as_ref().map_or(name, |views| &views[name].tensor);
        self.set.entry(name).expect("a tensor of the list").1.dtype
    }

    /// How a tensor is stored, for people.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn stored_as(&self, name: &str) -> &'static str {
        let packed = self.views.as_ref().and_then(|views| views[name].packed.as_ref());
        packed.map_or_else(|| self.stored(name).name(), |packed| packed.packing.name())
    }

    /// What names the files in messages.
    pub(super) fn path(&self) -> PathBuf {
        path_of(&self.folder, &self.set)
    }

    /// Opens a tensor; none if there is no such.
    ///
    /// # Errors
    /// A file that cannot be read; what it is too large for its type here.
    pub(super) fn open(&self, name: &str) -> Result<Option<OpenTensor>, Error> {
        let stored = self.open_plain(name)?;
        match (stored, self.sums.get(name)) {
            (Some(stored), Some(sum)) => Ok(Some(self.with(stored, sum)?)),
            (stored, _) => Ok(stored),
        }
    }

    /// A matrix with what is added, in the type that it is stored in.
    fn with(&self, matrix: OpenTensor, LowRankSum { a, b, scale }: &LowRankSum) -> Result<OpenTensor, Error> {
        let read = |tensor: &OpenTensor| {
            let bytes = tensor.read(0, tensor.shape.iter().product())?;
            Ok::<Vec<f32>, Error>(tensor.dtype.values(&bytes).collect())
        };
        let factor = |name: &str| read(&self.open_plain(name)?.expect("a factor of the files"));
        let (mut values, a, b, dtype) = (read(&matrix)?, factor(a)?, factor(b)?, matrix.dtype);
        let [outputs, inputs] = matrix.shape[..] else { panic!("{:?} is no matrix", matrix.shape) };
        let rank = b.len() / outputs;
        for (row, b) in values.chunks_exact_mut(inputs).zip(b.chunks_exact(rank)) {
            for (b, a) in b.iter().zip(a.chunks_exact(inputs)) {
                row.iter_mut().zip(a).for_each(|(w, a)| *w += scale * b * a);
            }
        }
        let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
        Ok(OpenTensor { elements: ElementSource::Memory(ElementType::F32.converted(bytes, dtype)), ..matrix })
    }

    fn open_plain(&self, name: &str) -> Result<Option<OpenTensor>, Error> {
        let Some(views) = &self.views else { return self.open_stored(name, TensorCut::default()) };
        let Some(view) = views.get(name) else { return Ok(None) };
        if let Some(packed) = &view.packed {
            return self.unpacked(view, packed).map(Some);
        }
        let stored = self.open_stored(&view.tensor, view.cut)?.expect("a view is of a tensor that is there");
        if view.cut.is_contiguous() && stored.dtype == view.dtype {
            return Ok(Some(OpenTensor { shape: view.shape.clone(), ..stored }));
        }
        let (from, len) = (stored.dtype, view.shape.iter().product::<usize>());
        let span = stored.read(0, view.cut.span(&view.shape).len())?;
        let bytes = from.converted(view.cut.gather(span, &view.shape, from.bytes()), view.dtype);
        debug_assert_eq!(bytes.len(), len * view.dtype.bytes());
        Ok(Some(OpenTensor {
            shape: view.shape.clone(),
            dtype: view.dtype,
            elements: ElementSource::Memory(bytes),
            ..stored
        }))
    }

    /// A tensor whose elements are packed there. What is read at a time is the block that its cut is of.
    fn unpacked(
        &self,
        view: &TensorView,
        PackedWeight { packing, scales }: &PackedWeight,
    ) -> Result<OpenTensor, Error> {
        let whole = view.cut.whole(&view.shape);
        let [codes_at, scales_at] = packing.places(&view.cut.span(&view.shape), &whole);
        let open = |name: &str| Ok::<_, Error>(self.open_stored(name, TensorCut::default())?.expect("a view's halves"));
        let (stored, scales) = (open(&view.tensor)?, open(scales)?);
        let codes = stored.read(codes_at.start, codes_at.len())?;
        let factors = scales.read(scales_at.start, scales_at.len())?;
        let factors: Vec<f32> = scales.dtype.values(&factors).collect();
        let span = packing.unpacked((&codes, &factors), &whole, view.dtype);
        let bytes = view.cut.gather(span, &view.shape, view.dtype.bytes());
        Ok(OpenTensor {
            shape: view.shape.clone(),
            dtype: view.dtype,
            elements: ElementSource::Memory(bytes),
            ..stored
        })
    }

    /// A tensor of the files from the first element that is among a part's.
    fn open_stored(&self, name: &str, cut: TensorCut) -> Result<Option<OpenTensor>, Error> {
        let Some((number, entry)) = self.set.entry(name) else { return Ok(None) };
        // Not kept open: there may be more files than a process may have.
        let path = self.folder.join(&self.set.files[number].0);
        let file = regular(&path).map_err(Error::io("open", &path))?;
        let shape = cut.own(&entry.shape).expect("views fit");
        let start = entry.start + (cut.span(&shape).start * entry.dtype.bytes()) as u64;
        let (name, dtype, shape) = (name.to_owned(), entry.dtype, entry.shape.clone());
        Ok(Some(OpenTensor { name, path, dtype, shape, elements: ElementSource::File(file, start) }))
    }

    /// All elements of a tensor, as they are in a file of its type.
    ///
    /// # Errors
    /// A file that cannot be read, or has values that are no finite numbers.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn read(&self, name: &str) -> Result<Vec<u8>, Error> {
        self.open(name)?.expect("a tensor of the list").read_all()
    }
}

/// A tensor whose elements can be read.
pub(super) struct OpenTensor {
    /// In the files, where also `path` is.
    name: String,
    path: PathBuf,
    pub(super) dtype: ElementType,
    pub(super) shape: Vec<usize>,
    elements: ElementSource,
}

enum ElementSource {
    /// From this byte on.
    File(File, u64),
    /// Gathered.
    Memory(Vec<u8>),
}

impl OpenTensor {
    /// All elements.
    ///
    /// # Errors
    /// As [`OpenTensor::read`].
    fn read_all(self) -> Result<Vec<u8>, Error> {
        match self.elements {
            ElementSource::Memory(bytes) => finite(self.dtype, bytes, (&self.path, &self.name)),
            ElementSource::File(..) => self.read(0, self.shape.iter().product()),
        }
    }

    /// So many elements from one on.
    ///
    /// # Errors
    /// A file that cannot be read, or has values that are no finite numbers.
    pub(super) fn read(&self, first: usize, len: usize) -> Result<Vec<u8>, Error> {
        let (size, path) = (self.dtype.bytes(), &self.path);
        let bytes = match &self.elements {
            ElementSource::Memory(bytes) => bytes[first * size..][..len * size].to_vec(),
            ElementSource::File(file, start) => {
                let mut bytes = vec![0; len * size];
                file.read_exact_at(&mut bytes, start + (first * size) as u64).map_err(Error::io("read", path))?;
                bytes
            }
        };
        finite(self.dtype, bytes, (path, &self.name))
    }
}

fn finite(dtype: ElementType, bytes: Vec<u8>, (path, name): (&Path, &str)) -> Result<Vec<u8>, Error> {
    match dtype.are_finite(&bytes) {
        true => Ok(bytes),
        false => Err(Error::damaged(path, format!("{name} has values that are no finite numbers"))),
    }
}
