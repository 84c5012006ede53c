//! Whether a folder's tensors are a model's, all of them and no others, and whether two folders have the same.

use std::collections::BTreeMap;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::Error;
use super::folder::{ModelFolder, ModelKind};
use crate::checkpoint::ElementType;
use crate::config::Config;
use crate::lora::is_factor;

/// What an audit has found of a folder in which nothing is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditReport {
    pub kind: ModelKind,
    pub family: &'static str,
    /// By kind of tensor, in order of their names.
    pub parts: Vec<TensorSum>,
    /// SHA-256 over all tensors in the order of their names: name, shape and values as f32. Two folders whose models are
    /// equal have the same, whatever their layout.
    pub sha256: String,
    /// Files of tensors, and tensors in them.
    pub files: usize,
    pub stored: usize,
    /// How many experts each layer with experts has.
    pub experts: Vec<(usize, usize)>,
}

/// Tensors of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSum {
    pub part: &'static str,
    pub tensors: u64,
    pub elements: u64,
    pub dtypes: String,
}

/// Opens a folder and reads every tensor.
///
/// # Errors
/// All that is wrong with it.
pub fn audit(folder: &Path) -> Result<(ModelFolder, AuditReport), Error> {
    let model = ModelFolder::open(folder, None)?;
    model.check_state()?;
    let report = summed(&model)?;
    Ok((model, report))
}

/// The sums of a folder that has been opened: every element is read.
fn summed(model: &ModelFolder) -> Result<AuditReport, Error> {
    let mut hasher = Sha256::new();
    let mut parts: BTreeMap<&'static str, (u64, u64, Vec<&'static str>)> = BTreeMap::new();
    for (name, (dtype, shape)) in model.files.list() {
        let bytes = model.files.read(&name)?;
        hasher.update(format!("{name} {shape:?}\n"));
        let mut values = Vec::with_capacity(1 << 16);
        for chunk in bytes.chunks(1 << 15) {
            values.clear();
            dtype.values(chunk).for_each(|value| values.extend_from_slice(&value.to_le_bytes()));
            hasher.update(&values);
        }
        let sum = parts.entry(part(&name)).or_default();
        sum.0 += 1;
        sum.1 += shape.iter().product::<usize>() as u64;
        let stored = model.files.stored_as(&name);
        if !sum.2.contains(&stored) {
            sum.2.push(stored);
        }
    }
    let sum = |(part, (tensors, elements, dtypes)): (&'static str, (u64, u64, Vec<&str>))| TensorSum {
        part,
        tensors,
        elements,
        dtypes: dtypes.join("+"),
    };
    let sha256 = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let set = model.files.set();
    Ok(AuditReport {
        kind: model.kind,
        family: model.family,
        parts: parts.into_iter().map(sum).collect(),
        sha256,
        files: set.files.len(),
        stored: set.entries().count(),
        experts: experts(&model.config),
    })
}

fn experts(config: &Config) -> Vec<(usize, usize)> {
    let of_layers = config.moe.iter().flat_map(|moe| moe.of_layers(config.model.layers));
    of_layers.map(|(layer, moe)| (layer, moe.experts)).collect()
}

/// The kind of a tensor, by its name.
fn part(name: &str) -> &'static str {
    let has = |text: &str| name.contains(text);
    match () {
        () if is_factor(name) => "adapters",
        () if has(".experts.") => "experts",
        () if has(".shared_expert") => "shared experts",
        () if has("block_sparse_moe") => "router",
        () if has("attn.") || has("attention_bias") => "attention",
        () if has("norm") => "norms",
        () if has(".mlp.") => "feed-forward",
        () if has("embed") => "embedding",
        () if has("lm_head") => "head",
        () => "other",
    }
}

/// Whether elements that go from type to type become others; in parts, for a tensor may be half of the memory there is.
fn are_alike((before, types): (&[u8], &[ElementType]), after: &[u8]) -> bool {
    const ELEMENTS: usize = 1 << 16;
    let (first, last) = (types[0], types[types.len() - 1]);
    let parts = before.chunks(ELEMENTS * first.bytes()).zip(after.chunks(ELEMENTS * last.bytes()));
    let through = |part: &[u8]| types.windows(2).fold(part.to_vec(), |part, pair| pair[0].converted(part, pair[1]));
    before.len() / first.bytes() == after.len() / last.bytes()
        && parts.into_iter().all(|(before, after)| through(before) == after)
}

/// Compares a model with what it has been converted to, tensor by tensor, from the disk. Returns how many tensors are
/// rounded, because they are stored in fewer bits.
///
/// # Errors
/// Every tensor that is missing, or is neither the same nor the same rounded.
pub fn compare(from: &ModelFolder, to: &ModelFolder) -> Result<u64, Error> {
    let (theirs, ours) = (from.files.list(), to.files.list());
    let mut problems: Vec<String> = ours
        .keys()
        .filter(|name| !theirs.contains_key(*name))
        .map(|name| format!("{name} comes from nowhere"))
        .collect();
    let mut rounded = 0;
    for (name, (dtype, shape)) in &theirs {
        let Some((own, own_shape)) = ours.get(name) else {
            problems.push(format!("{name} is missing"));
            continue;
        };
        let (before, after) = (from.files.read(name)?, to.files.read(name)?);
        let stored = to.files.stored(name);
        let nearest = are_alike((&before, &[*dtype, *own]), &after);
        let stored_nearest = || are_alike((&before, &[*dtype, stored, *own]), &after);
        if own_shape != shape || !nearest && !stored_nearest() {
            problems.push(format!("{name} has other elements"));
        }
        // The nearest values are the same ones if they lead back.
        let same = nearest && are_alike((&after, &[*own, *dtype]), &before);
        rounded += u64::from(!same);
    }
    let folder = to.folder.clone();
    if problems.is_empty() { Ok(rounded) } else { Err(Error::Differs { folder, problems }) }
}
