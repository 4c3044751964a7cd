/* A stand-in for pyxis (NVIDIA's SPANK plugin): srun's container options with its names and meaning, as far as
 * launch/lib/roles.sh uses them. The image is a folder. A task sees the image, the system's folders (the packages that an
 * image would hold), and what --container-mounts lists; nothing else of the node. Needs root, as pyxis' own setup does.
 * Each task appends "JOB.STEP" to the file `steps` of the image.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

SPANK_PLUGIN(pyxis, 1)

static struct spank_option image = {"container-image", "FOLDER", "the image", 1, 0, NULL};
static struct spank_option mounts = {"container-mounts", "SRC:DST,...", "folders of the node", 1, 0, NULL};
static struct spank_option workdir = {"container-workdir", "PATH", "where tasks start", 1, 0, NULL};
static struct spank_option home = {"no-container-mount-home", NULL, "without the user's home", 0, 0, NULL};
static struct spank_option name = {"container-name", "NAME", "keep the container on the node", 1, 0, NULL};

int slurm_spank_init(spank_t spank, int argc, char **argv) {
    struct spank_option *options[] = {&image, &mounts, &workdir, &home, &name};
    for (int i = 0; i < 5; i++) {
        if (spank_option_register(spank, options[i]) != ESPANK_SUCCESS) return -1;
    }
    return 0;
}

static int fail(const char *what, const char *path) {
    slurm_error("container: %s %s: %m", what, path);
    return -1;
}

/* Bind `source` at `target` of the image, whose folders are made. */
static int bind_folder(const char *root, const char *source, const char *target) {
    char path[4096];
    int length = snprintf(path, sizeof path, "%s%s", root, target);
    for (char *slash = path + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
        *slash = 0;
        mkdir(path, 0755);
        *slash = '/';
    }
    if (length <= 0 || length >= (int)sizeof path) return fail("too long", target);
    mkdir(path, 0755);
    return mount(source, path, NULL, MS_BIND | MS_REC, NULL) ? fail("bind", target) : 0;
}

static int bind_listed(const char *root, char *list) {
    for (char *save, *entry = strtok_r(list, ",", &save); entry != NULL; entry = strtok_r(NULL, ",", &save)) {
        char *target = strchr(entry, ':');
        if (target == NULL) return fail("no target in", entry);
        *target++ = 0;
        if (bind_folder(root, entry, target)) return -1;
    }
    return 0;
}

static void note_step(spank_t spank, const char *root) {
    uint32_t job = 0, step = 0;
    char path[4096];
    spank_get_item(spank, S_JOB_ID, &job);
    spank_get_item(spank, S_JOB_STEPID, &step);
    snprintf(path, sizeof path, "%s/steps", root);
    FILE *file = fopen(path, "a");
    if (file == NULL) return;
    fprintf(file, "%u.%u\n", job, step);
    fclose(file);
}

int slurm_spank_task_init_privileged(spank_t spank, int argc, char **argv) {
    static const char *system_folders[] = {"/usr", "/bin", "/lib", "/lib64", "/sbin", "/etc", "/proc", "/dev"};
    char *root = NULL, *list = NULL, *start = "/";
    if (spank_option_getopt(spank, &image, &root) != ESPANK_SUCCESS) return 0;
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) return fail("unshare", root);
    for (size_t i = 0; i < sizeof system_folders / sizeof *system_folders; i++) {
        if (bind_folder(root, system_folders[i], system_folders[i])) return -1;
    }
    if (spank_option_getopt(spank, &mounts, &list) == ESPANK_SUCCESS && bind_listed(root, strdup(list))) return -1;
    spank_option_getopt(spank, &workdir, &start);
    note_step(spank, root);
    if (chroot(root) || chdir(start)) return fail("enter", start);
    return 0;
}
